#!/usr/bin/env bash
# Llama-3.1-8B, RLOO (leave-one-out baseline) on one node: four GPUs train, four generate.
# shape: llama-3.1-8b
# gpus: 8 x h100-80g
#   MODEL_DIR=/models/llama-3.1-8b PROMPT_DATA=train.jsonl bash scripts/models/llama3.1_8b_rloo_1node.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/llama3.1_8b_rloo_1node}" \
    --device cuda --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 4 --tensor-model-parallel-size 2 --sequence-parallel --rollout-num-engines 4 \
    --advantage-estimator rloo \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 2048 --max-tokens-per-worker 8192 --recompute-activations \
    --lr 5e-7 --save-interval 20 \
    "$@"
