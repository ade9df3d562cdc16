#!/usr/bin/env bash
# Qwen3-4B, GRPO on one node: four GPUs train, four generate, one step off.
# shape: qwen3-4b
# gpus: 8 x h100-80g
#   MODEL_DIR=/models/qwen3-4b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_4b_1node.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_4b_1node}" \
    --device cuda --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 4 --rollout-num-engines 4 --rollout-ahead 1 \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 8192 --max-tokens-per-worker 10240 --recompute-activations \
    --off-policy-correction tis_token \
    --lr 1e-6 --save-interval 20 \
    "$@"
