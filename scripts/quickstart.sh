#!/usr/bin/env bash
# The main job on a machine without a GPU: install into .venv, make a tiny model and an arithmetic task, warm the model up
# on labelled rows, then teach it by GRPO with the real engines. Ends with one RESULT line and says where the pictures are.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_cpu.sh
source .venv/bin/activate
DATA=runs/quickstart-data
WARMUP=runs/quickstart-warmup
RUN=runs/quickstart
python tools/make_quickstart.py --output "$DATA" --seed "${SEED:-1}"

echo "== 1/2 supervised warm-up: until 35 % of the held-out prompts are answered right"
bash scripts/quickstart_stages.sh warmup "$DATA" "$WARMUP"
echo "== 2/2 GRPO from there: Megatron-core trains, SGLang generates"
bash scripts/quickstart_stages.sh grpo "$DATA" "$RUN" "$WARMUP/hf"

python - "$WARMUP/summary.json" "$RUN/summary.json" <<'PY'
import json, sys
warmup, run = (json.load(open(path)) for path in sys.argv[1:])
folder = sys.argv[2].rsplit("/", 1)[0]
print(f"report:   {folder}/report.html")
print(f"pictures: {folder}/*.png")
print(f"model:    {folder}/hf (a Hugging Face folder)")
print(
    f"RESULT accuracy_before={run['accuracy_before']:.3f} accuracy_after={run['accuracy_after']:.3f} "
    f"seconds={warmup['seconds'] + run['seconds']:.0f} peak_rss_gib={max(warmup['peak_rss_gib'], run['peak_rss_gib']):.2f}"
)
PY
