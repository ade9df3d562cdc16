#!/usr/bin/env bash
# Qwen2.5-1.5B, GSPO (sequence-level ratios) on four GPUs: two train, two generate, one step off.
# shape: qwen2.5-1.5b
# gpus: 4 x a100-40g
#   MODEL_DIR=/models/qwen2.5-1.5b PROMPT_DATA=train.jsonl bash scripts/models/qwen2.5_1.5b_gspo_4gpu.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen2.5_1.5b_gspo_4gpu}" \
    --device cuda --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 2 --rollout-num-engines 2 --rollout-ahead 1 \
    --policy-loss gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --loss-aggregation seq-mean-token-mean \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --num-updates-per-rollout 2 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 2048 --max-tokens-per-worker 8192 --recompute-activations \
    --lr 1e-6 --save-interval 50 \
    "$@"
