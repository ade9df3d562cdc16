#!/usr/bin/env bash
# Installs what is missing, then lints and runs every test. `scripts/test.sh unit` leaves the real-engine tests out.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_cpu.sh
source .venv/bin/activate
ruff check .
ruff format --check .
pyright
codespell
python tools/generate_docs.py --check
bash scripts/validate_launch_scripts.sh
if [ "${1:-all}" = unit ]; then
    python -m pytest -q tests/unit tests/contracts tests/test_architecture.py
else
    python -m pytest -q tests
fi
