"""Real runs of the main job at the smallest size: real Ray, Megatron-core, SGLang and router on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def base_flags(data: Path, run_dir: Path) -> list[str]:
    """Flags of a GRPO run with steps of 4 x 4 samples."""
    return [
        *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl")),
        *("--rm-type", "exact", "--max-prompt-len", "32", "--max-response-len", "6"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--lr", "1e-3"),
        *("--run-dir", str(run_dir)),
    ]


def train_command(flags: list[str]) -> list[str]:
    return [sys.executable, "-m", "slime_rl.train", *flags]


def environment() -> dict[str, str]:
    """The tests' own plugins are importable from the run, as a user's are from the folder the run starts in."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_train(flags: list[str], timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """A whole run; its output is in the result."""
    return subprocess.run(
        train_command(flags), env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def start_train(flags: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Begin a run whose output goes to `log_path`."""
    with log_path.open("w") as log:
        return subprocess.Popen(train_command(flags), env=environment(), stdout=log, stderr=log)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_metrics(run_dir: Path, having: str = "train/loss") -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    return [line for line in read_metrics(run_dir) if having in line]
