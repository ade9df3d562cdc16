"""Kills of real runs, for benchmarks/chaos_buffer.py: driver, rollout actor, engine and trainer, one after the other.

Each run is the quickstart's model and prompts with Ray, SGLang and Megatron-core; its victim gets SIGKILL while the
run is at work. The run must end by itself, and is started again from its newest checkpoint; the last one finishes. What
each step trained on is read from --dump-rollouts and compared with the order of the prompts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from slime_rl.buffer.dumps import RolloutDumps
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import parse_config
from tools.make_quickstart import main as make_quickstart

BATCH = 4
VICTIMS = {
    "driver": "",
    "rollout actor": "ray::RolloutActor",
    "trainer": "ray::TrainActor",
    "engine": "slime_rl.engine.launch_engine",
}
STEPS_BETWEEN_KILLS = 4
MOST_S = 300.0  # for a run to get to its kill, and to end after it


def kill_real_runs(num_kills: int, rng: random.Random) -> tuple[int, int, int]:
    """(kills, lost, twice) of one run that is killed `num_kills` times.

    Raises:
        ValueError: the run ended for another reason, or hung.
    """
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        make_quickstart(["--output", str(folder / "data")])
        steps = STEPS_BETWEEN_KILLS * (num_kills + 1)
        flags = run_flags(folder, steps)
        for number in range(num_kills):
            victim = list(VICTIMS)[number % len(VICTIMS)]
            after = STEPS_BETWEEN_KILLS * number + rng.randint(1, STEPS_BETWEEN_KILLS)
            kill_one(flags, folder, victim, after, rng.uniform(0, 0.5))
        process = start(flags, folder)
        if process.wait(MOST_S) != 0:
            raise ValueError(f"the last real run failed:\n{(folder / 'log').read_text()[-2000:]}")
        lost, twice, same = faults(flags, RolloutDumps(folder / "rollouts"), steps)
    print(
        f"real run of {steps} steps: {num_kills} kills, lost {lost}, twice {twice}, same prompts in each step: {same}",
        flush=True,
    )
    return num_kills, lost, twice


def run_flags(folder: Path, steps: int) -> list[str]:
    data = folder / "data"
    return [
        *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl"), "--rm-type", "exact"),
        *("--max-prompt-len", "32", "--max-response-len", "6", "--rollout-batch-size", str(BATCH)),
        *("--n-samples-per-prompt", "2", "--num-steps", str(steps), "--rollout-ahead", "1", "--save-interval", "2"),
        *("--run-dir", str(folder / "run"), "--dump-rollouts", str(folder / "rollouts")),
    ]


def start(flags: list[str], folder: Path) -> subprocess.Popen[bytes]:
    checkpoints = folder / "run" / "checkpoints"
    resume = ["--load", str(checkpoints)] if (checkpoints / "latest").is_file() else ["--overwrite"]
    with (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "slime_rl.train", *flags, *resume]
        return subprocess.Popen(command, stdout=log, stderr=log)


def kill_one(flags: list[str], folder: Path, victim: str, after: int, delay_s: float) -> None:
    """Run until `after` steps are finished, wait a moment, kill the victim, wait until nothing of the run is left."""
    process = start(flags, folder)
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + MOST_S
    while not metrics.is_file() or metrics.read_text().count('"train/loss"') < after:
        if process.poll() is not None or time.monotonic() > deadline:
            raise ValueError(f"a real run did not get to step {after}:\n{(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.05)
    time.sleep(delay_s)
    family = psutil.Process(process.pid).children(recursive=True)
    pid = process.pid if victim == "driver" else find(family, VICTIMS[victim])
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    process.wait(MOST_S)
    _, left = psutil.wait_procs(family, timeout=30)
    left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if left or (victim != "driver" and process.returncode == 0):
        raise ValueError(f"after the {victim} was killed: exit code {process.returncode}, {len(left)} processes left")
    print(
        f"killed the {victim} after {after} steps; the run ended {time.monotonic() - started:.1f} s later", flush=True
    )


def find(family: list[psutil.Process], title: str) -> int:
    """The process with `title` in its command line; what only supervises it is another one."""
    seen = []
    for process in family:
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        seen.append(line[:60])
        if title in line and "supervise.py" not in line:
            return process.pid
    raise ValueError(f"no process {title!r} among {seen}")


def faults(flags: list[str], dumps: RolloutDumps, steps: int) -> tuple[int, int, bool]:
    """(prompts of the run that did not train, trainings beyond the first, whether each step had the prompts it has in a
    run that nobody kills: the next ones in order)."""
    source = FilePromptSource(parse_config(flags))
    order = [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(steps * BATCH)]
    trained = [[(group.epoch, group.source_index) for group in dumps.read(step)] for step in range(steps)]
    same = all(prompts == order[BATCH * step : BATCH * (step + 1)] for step, prompts in enumerate(trained))
    counts = Counter(prompt for prompts in trained for prompt in prompts)
    return len(set(order) - counts.keys()), sum(count - 1 for count in counts.values()), same
