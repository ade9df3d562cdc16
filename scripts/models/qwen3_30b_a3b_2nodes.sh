#!/usr/bin/env bash
# Qwen3-30B-A3B (mixture of experts) on two nodes: experts over eight training GPUs, engines of four.
# shape: qwen3-30b-a3b
# gpus: 16 x h200-141g
# Start Ray on both nodes first: docs/multi_node.md.
#   MODEL_DIR=/models/qwen3-30b-a3b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_30b_a3b_2nodes.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_30b_a3b_2nodes}" \
    --device cuda --ray-address auto --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 8 --expert-model-parallel-size 8 --rollout-num-engines 2 --rollout-num-gpus-per-engine 4 \
    --rollout-ahead 1 --policy-loss gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --loss-aggregation seq-mean-token-mean \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 8192 --max-tokens-per-worker 10240 --recompute-activations \
    --lr 1e-6 --save-interval 20 \
    "$@"
