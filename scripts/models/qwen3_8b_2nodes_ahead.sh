#!/usr/bin/env bash
# Qwen3-8B on two nodes: one trains, one generates a step ahead, long responses spread over two GPUs each (context parallel).
# shape: qwen3-8b
# gpus: 16 x h100-80g
# Start Ray on both nodes first: docs/multi_node.md.
#   MODEL_DIR=/models/qwen3-8b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_8b_2nodes_ahead.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_8b_2nodes_ahead}" \
    --device cuda --ray-address auto --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 8 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
    --rollout-num-engines 8 --rollout-ahead 1 \
    --policy-loss decoupled_ppo --old-log-probs recompute --behave-weight-cap 5 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-updates-per-rollout 2 --num-steps 500 \
    --max-prompt-len 2048 --max-response-len 16384 --max-tokens-per-worker 9216 --recompute-activations \
    --lr 1e-6 --save-interval 20 \
    "$@"
