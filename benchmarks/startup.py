"""Seconds from the command to the first finished training step, by part, on the quickstart's model.

    python benchmarks/startup.py [--model MODEL_DIR] [--runs 1]

The model is made before the clock starts. Parts come from what the run leaves: the time at which its folder and Ray's
address appear, and the phases of its summary. Last line: `first_step_s=…`, the best of the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.observability.tracker import read_jsonl
from tools.make_quickstart import main as make_quickstart

TIMEOUT_S = 500.0


def wait_for(path: Path, process: subprocess.Popen[bytes], needle: str = "") -> float:
    """The clock when `path` holds `needle`.

    Raises:
        RuntimeError: the run ended before, or took longer than TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if path.exists() and needle in path.read_text():
            return time.monotonic()
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {process.returncode} before {path.name} was there")
        time.sleep(0.02)
    raise RuntimeError(f"{path} was not there after {TIMEOUT_S:.0f} s")


def measure(data: Path, model: Path, run: Path) -> dict[str, float]:
    """Seconds by part of one run; `first step done` is the whole."""
    command = [sys.executable, "-m", "slime_rl.train", "--hf-checkpoint", str(model), "--run-dir", str(run)]
    command += ["--prompt-data", str(data / "train.jsonl"), "--rm-type", "exact", "--num-steps", "1", "--device", "cpu"]
    command += ["--max-prompt-len", "64", "--max-response-len", "6"]
    command += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
    begin = time.monotonic()
    with (run.parent / f"{run.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        checked = wait_for(run / ".lock", process)
        ray = wait_for(run / "logs" / "ray_address", process)
        stepped = wait_for(run / "metrics.jsonl", process, "train/loss")
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
    phases = json.loads((run / "summary.json").read_text())["phases_s"]
    line = read_jsonl(run / "metrics.jsonl")[0]
    first_sync = phases["sync"] - line["timing_s/sync"]
    parts = {
        "imports, flags, checks": checked - begin,
        "Ray": ray - checked,
        "engines, router, trainer, data (at once)": phases["start"],
        "first weight sync": first_sync,
        "rollout": line["timing_s/rollout"],
        "train": line["timing_s/train"],
        "second weight sync": line["timing_s/sync"],
    }
    total = stepped - begin
    return {**parts, "rest": total - sum(parts.values()), "first step done": total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; the quickstart's when not given")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_quickstart(["--output", str(folder / "data")])
        for number in range(args.runs):
            parts = measure(folder / "data", args.model or folder / "data" / "model", folder / f"run{number}")
            if not best or parts["first step done"] < best["first step done"]:
                best = parts
    print("| part | seconds |\n|---|---:|")
    for part, seconds in best.items():
        print(f"| {part} | {seconds:.1f} |")
    print(f"first_step_s={best['first step done']:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
