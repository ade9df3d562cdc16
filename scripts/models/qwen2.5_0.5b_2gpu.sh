#!/usr/bin/env bash
# Qwen2.5-0.5B, GRPO on two GPUs: one trains, one generates.
# shape: qwen2.5-0.5b
# gpus: 2 x rtx4090-24g
#   MODEL_DIR=/models/qwen2.5-0.5b PROMPT_DATA=train.jsonl bash scripts/models/qwen2.5_0.5b_2gpu.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen2.5_0.5b_2gpu}" \
    --device cuda --train-dtype bfloat16 --weight-sync distributed --engine-mem-fraction 0.8 \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps 200 \
    --max-prompt-len 512 --max-response-len 1024 --max-tokens-per-worker 8192 --recompute-activations \
    --lr 1e-6 --save-interval 50 \
    "$@"
