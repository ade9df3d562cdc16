#!/usr/bin/env bash
# Qwen2.5-7B, DAPO (clip higher, dynamic sampling, soft overlong penalty) on one node: four GPUs train, four generate.
# shape: qwen2.5-7b
# gpus: 8 x h100-80g
#   MODEL_DIR=/models/qwen2.5-7b PROMPT_DATA=train.jsonl bash scripts/models/qwen2.5_7b_dapo_1node.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen2.5_7b_dapo_1node}" \
    --device cuda --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 4 --tensor-model-parallel-size 2 --sequence-parallel --rollout-num-engines 4 \
    --eps-clip 0.2 --eps-clip-high 0.28 --loss-aggregation token-mean \
    --dynamic-filter-path nonzero_std --over-sampling-batch-size 96 --overlong-buffer-len 1024 \
    --rollout-batch-size 64 --n-samples-per-prompt 16 --num-updates-per-rollout 4 --num-steps 500 \
    --max-prompt-len 1024 --max-response-len 8192 --max-tokens-per-worker 16384 --recompute-activations \
    --lr 1e-6 --save-interval 20 \
    "$@"
