#!/usr/bin/env bash
# Every launch script in scripts/, dry-run without weights. Last line: scripts=… ok=…
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
python tools/validate_launch_scripts.py
