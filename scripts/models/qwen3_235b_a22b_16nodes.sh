#!/usr/bin/env bash
# Qwen3-235B-A22B (mixture of experts) on 16 nodes: 64 GPUs train, 64 generate in engines of eight.
# shape: qwen3-235b-a22b
# gpus: 128 x h200-141g
# Start Ray on all nodes first: docs/multi_node.md. The pipeline cuts 94 layers into two stages of 47.
#   MODEL_DIR=/models/qwen3-235b-a22b PROMPT_DATA=train.jsonl bash scripts/models/qwen3_235b_a22b_16nodes.sh [any further flag, --dry-run first]
set -euo pipefail
python -m slime_rl.train \
    --hf-checkpoint "${MODEL_DIR:?set it to a Hugging Face folder of the model}" \
    --prompt-data "${PROMPT_DATA:?set it to a file with prompts and labels}" \
    --run-dir "${RUN_DIR:-runs/qwen3_235b_a22b_16nodes}" \
    --device cuda --ray-address auto --train-dtype bfloat16 --weight-sync distributed \
    --train-num-workers 64 --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 \
    --expert-model-parallel-size 8 --rollout-num-engines 8 --rollout-num-gpus-per-engine 8 --rollout-ahead 1 \
    --policy-loss gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --loss-aggregation seq-mean-token-mean \
    --rollout-batch-size 256 --n-samples-per-prompt 8 --num-steps 300 \
    --max-prompt-len 1024 --max-response-len 8192 --max-tokens-per-worker 10240 --recompute-activations \
    --lr 1e-6 --save-interval 10 \
    "$@"
