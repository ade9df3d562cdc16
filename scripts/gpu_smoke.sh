#!/usr/bin/env bash
# Does it run on this machine's GPU? Each check says PASSED, FAILED or SKIPPED with the reason; under 10 minutes on one GPU.
#   bash scripts/gpu_smoke.sh [--output DIR] [--only NAME ...]
# Uses the environment that is active; `pip install -e '.[gpu,dev]'` brings what it needs. Exit code 1 when a check failed.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python tools/gpu_smoke.py "$@"
