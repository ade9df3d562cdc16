#!/usr/bin/env bash
# A policy learns that a calculator pays: a tiny model is warmed up on products that it gives up on in two thirds of the
# cases and asks a tool about in the others, then GRPO rewards right answers only. Ends with one RESULT line.
#   bash scripts/run_tool_use_cpu.sh [warmup|grpo]      both stages when none is named
# dry run: warmup
# dry run: grpo
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${SKIP_INSTALL:-}" ] || { bash scripts/install_cpu.sh && source .venv/bin/activate; }
DATA=${DATA:-runs/tool-use-data} WARMUP=${WARMUP:-runs/tool-use-warmup} RUN=${RUN:-runs/tool-use}
STAGE=${1:-all}

COMMON=(
    --generate-function-path agent_loop --tools calculator --tool-call-parser pythonic --max-turns 3
    --eval-prompt-data heldout "$DATA/heldout.jsonl" --eval-temperature 1.0
    --rm-type exact --max-prompt-len 48 --max-response-len 40 --seed "${SEED:-1}" --overwrite
)

if [ "$STAGE" != grpo ]; then
    python tools/make_tool_task.py --output "$DATA" --seed "${SEED:-1}"
    echo "== 1/2 supervised warm-up: until the calls are right: 0.36 of the held-out products, of which 0.35 are called"
    python -m slime_rl.train "${COMMON[@]}" --run-dir "$WARMUP" \
        --loss sft --n-samples-per-prompt 1 --hf-checkpoint "$DATA/model" --prompt-data "$DATA/sft.jsonl" \
        --rollout-batch-size 128 --num-steps 1000 --lr 4e-3 --lr-warmup-updates 20 \
        --eval-interval 20 --stop-at-eval-accuracy 0.36
fi
if [ "$STAGE" != warmup ]; then
    echo "== 2/2 GRPO: right answers pay, calls do not"
    python -m slime_rl.train "${COMMON[@]}" --run-dir "$RUN" \
        --hf-checkpoint "$WARMUP/hf" --prompt-data "$DATA/train.jsonl" \
        --rollout-batch-size 64 --n-samples-per-prompt 8 --num-updates-per-rollout 2 \
        --advantage-estimator grpo --no-grpo-std-normalization --eps-clip-high 0.28 --old-log-probs rollout \
        --num-steps 60 --lr 1e-3 --lr-decay-style linear --min-lr 2e-4 --adam-beta2 0.95 \
        --eval-interval 5 --stop-at-eval-accuracy 0.95
fi
python - "$RUN" <<'PY'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
if not (run / "summary.json").is_file():
    sys.exit(0)  # only the warm-up was asked for
summary = json.loads((run / "summary.json").read_text())
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
calls = [line["rollout/tool_calls_mean"] for line in lines if "rollout/tool_calls_mean" in line]
print(
    f"RESULT accuracy_before={summary['accuracy_before']:.3f} accuracy_after={summary['accuracy_after']:.3f} "
    f"tool_calls_per_sample={calls[-1]:.2f}"
)
PY
