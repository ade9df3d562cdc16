#!/usr/bin/env bash
# The two training stages of the quickstart, as launch scripts to learn from.
#   quickstart_stages.sh warmup DATA RUN_DIR            supervised, from random weights
#   quickstart_stages.sh grpo   DATA RUN_DIR HF_MODEL   reinforcement learning from the warm-up's export
# dry run: warmup DATA RUN
# dry run: grpo DATA RUN MODEL
set -euo pipefail
STAGE=$1 DATA=$2 RUN=$3

COMMON=(
    --eval-prompt-data heldout "$DATA/heldout.jsonl"
    --rm-type exact
    --max-prompt-len 32 --max-response-len 6
    --seed "${SEED:-1}"
    --run-dir "$RUN" --overwrite
)

case $STAGE in
warmup)
    python -m slime_rl.train "${COMMON[@]}" \
        --loss sft --n-samples-per-prompt 1 \
        --hf-checkpoint "$DATA/model" --prompt-data "$DATA/sft.jsonl" \
        --rollout-batch-size 64 --num-steps 600 --lr 4e-3 --lr-warmup-updates 20 \
        --eval-interval 10 --stop-at-eval-accuracy 0.35
    ;;
grpo)
    python -m slime_rl.train "${COMMON[@]}" \
        --hf-checkpoint "$4" --prompt-data "$DATA/train.jsonl" \
        --rollout-batch-size 128 --n-samples-per-prompt 8 --num-updates-per-rollout 4 \
        --advantage-estimator grpo --no-grpo-std-normalization --eps-clip-high 0.28 --old-log-probs rollout \
        --num-steps 60 --lr 1e-3 --lr-decay-style linear --min-lr 2e-4 --adam-beta2 0.95 \
        --eval-interval 6 --stop-at-eval-accuracy 0.95 --tensorboard
    ;;
*)
    echo "usage: quickstart_stages.sh warmup|grpo DATA RUN_DIR [HF_MODEL]" >&2
    exit 2
    ;;
esac
