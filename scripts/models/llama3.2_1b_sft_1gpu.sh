#!/usr/bin/env bash
# Llama-3.2-1B, supervised training on labelled rows, one GPU and no engine.
# shape: llama-3.2-1b
# gpus: 1 x a100-40g
#   MODEL_DIR=/models/llama-3.2-1b PROMPT_DATA=train.jsonl bash scripts/models/llama3.2_1b_sft_1gpu.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/llama3.2_1b_sft_1gpu}" \
    --device cuda --train-dtype bfloat16 --loss sft --n-samples-per-prompt 1 \
    --rollout-batch-size 128 --num-steps 1000 --lr 2e-5 --lr-warmup-updates 50 --lr-decay-style cosine \
    --max-prompt-len 1024 --max-response-len 2048 --max-tokens-per-worker 8192 --recompute-activations \
    --save-interval 200 \
    "$@"
