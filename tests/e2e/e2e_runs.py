"""Real runs of the main job at the smallest size: real Ray, Megatron-core, SGLang and router on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 1200.0  # of a run that takes half a minute on a quiet machine; only one that hangs lasts longer


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


def run_train(flags: list[str], timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """A whole run; its output is in the result."""
    return subprocess.run(
        train_command(flags), env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def start_train(flags: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Begin a run whose output goes to `log_path`."""
    with log_path.open("w") as log:
        return subprocess.Popen(train_command(flags), env=environment(), stdout=log, stderr=log)


def run_side_by_side(*flags: list[str], timeout_s: float = LIMIT_S) -> None:
    """Whole runs at once, which must all end well: they share two cores better than one after the other would."""
    logs = [Path(words[words.index("--run-dir") + 1]).with_suffix(".log") for words in flags]
    drivers = [start_train(words, log) for words, log in zip(flags, logs, strict=True)]
    try:
        for driver, log in zip(drivers, logs, strict=True):
            assert driver.wait(timeout=timeout_s) == 0, log.read_text()
    finally:
        for driver in drivers:
            driver.kill()


def run_with_kills(
    flags: list[str], kills: dict[int, Callable[[int], psutil.Process]], timeout_s: float = LIMIT_S
) -> None:
    """A whole run that must end well although it loses `kills[steps](pid of the driver)` after so many steps."""
    run_dir = Path(flags[flags.index("--run-dir") + 1])
    log = run_dir.with_name("log")
    driver = start_train(flags, log)
    try:
        for num_steps, victim in kills.items():
            deadline = time.monotonic() + timeout_s
            while not (run_dir / "metrics.jsonl").exists() or len(train_metrics(run_dir)) < num_steps:
                assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            victim(driver.pid).kill()
        assert driver.wait(timeout=timeout_s) == 0, log.read_text()
    finally:
        driver.kill()


def server_with(argument: str, driver: int) -> psutil.Process:
    """The SGLang server with this argument, wherever it is below the driver."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if argument in words and not any(word.endswith("supervise.py") for word in words):
            return process
    raise AssertionError(f"no server has {argument}")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines: a run that goes on may be writing another one."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_metrics(run_dir: Path, having: str = "train/loss") -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    return [line for line in read_metrics(run_dir) if having in line]
