#!/usr/bin/env bash
# Llama-3.1-70B, GRPO on eight nodes: 32 GPUs train as tensor x pipeline, 32 generate in engines of eight.
# shape: llama-3.1-70b
# gpus: 64 x h100-80g
# Start Ray on all nodes first: docs/multi_node.md.
#   MODEL_DIR=/models/llama-3.1-70b PROMPT_DATA=train.jsonl bash scripts/models/llama3.1_70b_8nodes.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/llama3.1_70b_8nodes}" \
    --device cuda --ray-address auto --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 32 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 \
    --rollout-num-engines 4 --rollout-num-gpus-per-engine 8 --rollout-ahead 1 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 4096 --max-tokens-per-worker 8192 --recompute-activations \
    --lr 5e-7 --save-interval 20 \
    "$@"
