#!/usr/bin/env bash
# Qwen3-32B, GRPO on four nodes: 16 GPUs train as tensor x pipeline, 16 generate in engines of four.
# shape: qwen3-32b
# gpus: 32 x h100-80g
# Start Ray on all nodes first: docs/multi_node.md.
#   MODEL_DIR=/models/qwen3-32b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_32b_4nodes.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_32b_4nodes}" \
    --device cuda --ray-address auto --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 16 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2 \
    --rollout-num-engines 4 --rollout-num-gpus-per-engine 4 --rollout-ahead 1 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 8192 --max-tokens-per-worker 10240 --recompute-activations \
    --lr 1e-6 --save-interval 20 \
    "$@"
