"""Kills of real runs, for benchmarks/chaos_buffer.py: driver, rollout actor, trainer and engine, one after the other.

Each run is the quickstart's model and prompts with Ray, SGLang and Megatron-core; its victim gets SIGKILL while the
run is at work. When driver or rollout actor are killed the run must end by itself, leave nothing behind, and is started
again from its newest checkpoint; without trainer or engine it must go on by itself. What each step trained on is read
from --dump-rollouts and compared with the ledger of the last checkpoint and with the order of the prompts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.chaos_account import Trained, account, prompt_order
from slime_rl.buffer.dumps import RolloutDumps
from slime_rl.cluster.checkpoint import CheckpointStore
from slime_rl.config import parse_config
from slime_rl.data.state_files import load_state
from tools.make_quickstart import main as make_quickstart

BATCH = 4
STEPS_BETWEEN_KILLS = 12  # of a quarter of a second
MOST_S = 300.0  # for a run to get to its next kill, and to end after it
VICTIMS = {
    "trainer": "ray::TrainActor",
    "driver": "",
    "engine": "slime_rl.engine.launch_engine",
    "rollout actor": "ray::RolloutActor",
}
ENDS_THE_RUN = ("driver", "rollout actor")


class RealMode(NamedTuple):
    flags: tuple[str, ...]
    is_fixed: bool  # whether the prompts of each step are the same in every run


MODES = {
    "one step off": RealMode(("--rollout-ahead", "1"), True),
    "continuous, partial": RealMode(("--fully-async", "--max-staleness", "1", "--partial-rollout"), False),
}


def kill_real_runs(num_kills: int, rng: random.Random) -> tuple[int, int, int]:
    """(kills, lost, twice) of one run in each mode; together they are killed `num_kills` times.

    Raises:
        ValueError: a run ended for another reason, did not end, or hung.
    """
    lost = twice = done = 0
    for number, (name, mode) in enumerate(MODES.items()):
        kills = (num_kills - done) // (len(MODES) - number)
        if kills == 0:
            continue
        victims = [list(VICTIMS)[(done + i) % len(VICTIMS)] for i in range(kills)]
        with tempfile.TemporaryDirectory() as root:
            run = RealRun(Path(root), mode, STEPS_BETWEEN_KILLS * (kills + 1))
            started = time.monotonic()
            for i, victim in enumerate(victims):
                run.kill(victim, STEPS_BETWEEN_KILLS * i + rng.randint(1, STEPS_BETWEEN_KILLS), rng.uniform(0, 0.5))
            run_lost, run_twice, same = run.finish()
        fixed = f", same prompts in each step: {same}" if mode.is_fixed else ""
        print(
            f"real run, {name}: {kills} kills, lost {run_lost}, twice {run_twice}{fixed} "
            f"({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        lost, twice, done = lost + run_lost, twice + run_twice, done + kills
    return done, lost, twice


class RealRun:
    """A run of `slime_rl.train` in `folder`, started again whenever it has ended."""

    def __init__(self, folder: Path, mode: RealMode, steps: int) -> None:
        self.folder, self.mode, self.steps = folder, mode, steps
        make_quickstart(["--output", str(folder / "data")])
        data = folder / "data"
        self.flags = [
            *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl"), "--rm-type", "exact"),
            *("--max-prompt-len", "32", "--max-response-len", "6", "--rollout-batch-size", str(BATCH)),
            *("--n-samples-per-prompt", "2", "--num-steps", str(steps), "--save-interval", "2"),
            *("--max-restarts", "1000", "--max-engine-restarts", "1000", "--engine-health-interval-s", "0.5"),
            *("--run-dir", str(folder / "run"), "--dump-rollouts", str(folder / "rollouts"), *mode.flags),
        ]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        checkpoints = self.folder / "run" / "checkpoints"
        resume = ["--load", str(checkpoints)] if (checkpoints / "latest").is_file() else ["--overwrite"]
        self.started_at = time.time()
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "slime_rl.train", *self.flags, *resume]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, victim: str, after: int, delay_s: float) -> None:
        """Wait until `after` steps are finished and a moment more, and kill the victim."""
        self._wait_for_steps(after)
        time.sleep(delay_s)
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(self.process.pid if victim == "driver" else find(family, VICTIMS[victim]), signal.SIGKILL)
        if victim not in ENDS_THE_RUN:
            print(f"killed the {victim} after {after} steps", flush=True)
            return
        started = time.monotonic()
        code = self.process.wait(MOST_S)
        _, left = psutil.wait_procs(family, timeout=30)
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left or code == 0:
            raise ValueError(f"after the {victim} was killed: exit code {code}, {len(left)} processes left")
        print(f"killed the {victim} after {after} steps; the run ended {time.monotonic() - started:.1f} s later")
        self.process = self._start()

    def _wait_for_steps(self, count: int) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        deadline = time.monotonic() + MOST_S

        def is_there() -> bool:
            """The run that was started last has trained, and the steps of all of them are enough."""
            is_new = metrics.is_file() and metrics.stat().st_mtime > self.started_at
            return is_new and metrics.read_text().count('"train/loss"') >= count

        while not is_there():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"a real run did not get to step {count}:\n{self._end_of_log()}")
            time.sleep(0.05)

    def finish(self) -> tuple[int, int, bool]:
        """(lost, twice, whether each step had the next prompts in order) of the run, which has its last kill behind it.

        Raises:
            ValueError: it does not end, or fails.
        """
        if self.process.wait(MOST_S) != 0:
            raise ValueError(f"the last part of a real run failed:\n{self._end_of_log()}")
        config, dumps = parse_config(self.flags), RolloutDumps(self.folder / "rollouts")
        groups = [(step, group) for step in range(self.steps) for group in dumps.read(step)]
        trained: Trained = [(step, g.group_index, g.epoch, g.source_index) for step, g in groups]
        folder, _ = CheckpointStore(config.checkpoint_dir, keep=2).latest()
        lost, twice = account(config, load_state(folder / "buffer.json")["ledger"], trained)
        order = prompt_order(config, self.steps * BATCH)
        return lost, twice, [(epoch, row) for _, _, epoch, row in trained] == order

    def _end_of_log(self) -> str:
        return (self.folder / "log").read_text()[-2000:]


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
