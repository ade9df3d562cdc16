#!/usr/bin/env bash
# Moonlight-16B-A3B (DeepSeek-V3 architecture: latent attention, experts) on one node: four GPUs train, four generate.
# shape: moonlight-16b-a3b
# gpus: 8 x h200-141g
#   MODEL_DIR=/models/moonlight-16b-a3b PROMPT_DATA=train.jsonl bash scripts/models/moonlight_16b_a3b_1node.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/moonlight_16b_a3b_1node}" \
    --device cuda --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 4 --expert-model-parallel-size 4 --rollout-num-engines 2 --rollout-num-gpus-per-engine 2 \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 4096 --max-tokens-per-worker 8192 --recompute-activations \
    --lr 1e-6 --save-interval 20 \
    "$@"
