#!/usr/bin/env bash
# Qwen3-8B, GRPO with a KL to the starting policy on one node, trainer and engines taking turns on all eight GPUs.
# shape: qwen3-8b
# gpus: 8 x h100-80g
#   MODEL_DIR=/models/qwen3-8b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_8b_colocated_1node.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_8b_colocated_1node}" \
    --device cuda --train-dtype bfloat16 --colocate --weight-sync tensor \
    --train-num-workers 8 --tensor-model-parallel-size 2 --sequence-parallel --rollout-num-engines 8 \
    --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 4096 --max-tokens-per-worker 8192 --recompute-activations \
    --lr 1e-6 --save-interval 20 \
    "$@"
