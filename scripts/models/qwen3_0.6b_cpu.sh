#!/usr/bin/env bash
# Qwen3-0.6B on a machine without a GPU: to try a reward or a plugin with a real model, not to train it well.
# shape: qwen3-0.6b
# gpus: cpu
# Needs about 15 GiB of memory.
#   MODEL_DIR=/models/qwen3-0.6b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_0.6b_cpu.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_0.6b_cpu}" \
    --device cpu \
    --rollout-batch-size 2 --n-samples-per-prompt 4 --num-steps 10 \
    --max-prompt-len 256 --max-response-len 64 --max-tokens-per-worker 1024 --recompute-activations \
    --lr 1e-6 \
    "$@"
