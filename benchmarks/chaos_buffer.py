"""Kill a run again and again: is every prompt trained exactly once?

    python benchmarks/chaos_buffer.py --kills 200 --seed 7
    python benchmarks/chaos_buffer.py --kills 200 --real 0      without the kills of real runs

A scripted run is a driver process with the real prompt source, ledger buffer, production, HTTP client and checkpoint
store (synchronous, one step off, fully asynchronous, with partial rollouts, with a byte budget that spills); its engine
and its trainer are scripted servers in processes of their own (benchmarks/chaos_servers.py; the "model" is the list of
groups that it has trained on). Driver, engine or trainer get SIGKILL at a random moment, or the driver at a random
visit of a place that it passes: generate, admit, take, train, commit, and three moments of a save. After a driver's
death the run starts again from its newest checkpoint; when the trainer is lost the driver goes back to it by itself;
requests that an engine takes with it are asked again.

After its last step, a run's trained groups are compared with the order of its prompts. lost: groups that have neither
trained nor been dropped by the filter nor still wait in the last checkpoint, or that an uninterrupted run trains and
this one does not (modes whose order is fixed). twice: trainings of a prompt beyond the first within an epoch.
--real N of the kills hit real runs, see benchmarks/chaos_real.py. Last line: `kills=… lost=… twice=…`; exit code 1
unless both are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import functools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.chaos_account import Trained, account  # noqa: E402
from benchmarks.chaos_real import kill_real_runs  # noqa: E402
from benchmarks.chaos_servers import (  # noqa: E402
    TOKEN_S,
    Server,
    Trainer,
    TrainerLost,
    engine_app,
    trainer_app,
)
from benchmarks.scripted_rollout import CharTokenizer, scripted_config  # noqa: E402
from slime_rl.buffer.ledger_buffer import LedgerBuffer  # noqa: E402
from slime_rl.buffer.sources import FilePromptSource  # noqa: E402
from slime_rl.cluster import checkpoint  # noqa: E402
from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore  # noqa: E402
from slime_rl.config import Config  # noqa: E402
from slime_rl.data.state_files import load_state, save_state  # noqa: E402
from slime_rl.rollout.client import EngineClient, Generation  # noqa: E402
from slime_rl.rollout.continuous import ContinuousProduction  # noqa: E402
from slime_rl.rollout.group_loop import group_loop  # noqa: E402
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime  # noqa: E402
from slime_rl.rollout.scope import SampleScope  # noqa: E402
from slime_rl.rollout.stepped import SteppedProduction  # noqa: E402
from slime_rl.types import Group, Sample  # noqa: E402

NUM_STEPS, BATCH, NUM_PROMPTS, KILLS_PER_RUN = 60, 4, 23, 12
CLOCK_S = 0.25  # mean time to a kill from outside
PLACES = ("generate", "admit", "take", "train", "commit", "save model", "save buffer", "save done")


class Mode(NamedTuple):
    flags: tuple[str, ...]
    is_fixed: bool  # whether the groups of each step are the same in every run


MODES = {
    "synchronous": Mode((), True),
    "one step off": Mode(("--rollout-ahead", "1"), True),
    "spilling": Mode(("--rollout-ahead", "1", "--buffer-memory-bytes", "4000"), True),
    "over-sampling": Mode(("--over-sampling-batch-size", "7", "--partial-rollout"), False),
    "continuous": Mode(("--fully-async", "--max-staleness", "2"), False),
    "continuous, partial": Mode(("--fully-async", "--max-staleness", "1", "--partial-rollout"), False),
}


@dataclass
class Trap:
    """Kills its own process at the `visits`-th visit of `place`."""

    place: str | None = None
    visits: int = 0

    def pass_by(self, place: str) -> None:
        if place == self.place:
            self.visits -= 1
            if self.visits <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


class TrappedBuffer(LedgerBuffer):
    """The ledger buffer, dying in the middle of things: after the account has changed, before the caller knows."""

    trap = Trap()

    def admit(self, group: Group) -> None:
        super().admit(group)
        self.trap.pass_by("admit")

    def take(self, step: int, num_groups: int) -> list[Group]:
        groups = super().take(step, num_groups)
        self.trap.pass_by("take")
        return groups

    def commit(self, step: int) -> None:
        super().commit(step)
        self.trap.pass_by("commit")


class TrappedClient(EngineClient):
    trap = Trap()

    async def _generate(
        self, scope: SampleScope, input_ids: list[int], sampling_params: dict[str, Any], routing_key: str | None
    ) -> Generation:
        generation = await super()._generate(scope, input_ids, sampling_params, routing_key)
        self.trap.pass_by("generate")
        return generation


def is_dropped(group_index: int) -> bool:
    """Which groups are dropped depends on the group alone, so that two runs can be compared."""
    return group_index % 7 == 3


def drop_some(config: Config, group: list[Sample]) -> str | None:
    return "every_seventh" if is_dropped(group[0].group_index) else None


def config_for(folder: Path, mode: Mode) -> Config:
    folder.mkdir()
    return scripted_config(
        folder,
        NUM_PROMPTS,
        *("--shuffle", "--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "2"),
        *("--num-steps", str(NUM_STEPS), "--dynamic-filter-path", "benchmarks.chaos_buffer:drop_some", *mode.flags),
    )


def saved_trained(folder: Path) -> Trained:
    return [tuple(entry) for entry in json.loads((folder / "model" / "trained.json").read_text())]


class Driver:
    """One life of the driver: train every remaining step in the order of `slime_rl.train`."""

    def __init__(self, config: Config, trap: Trap, engine_port: int, trainer_port: int) -> None:
        self.config, self.trap, self.engine_port = config, trap, engine_port
        self.store = CheckpointStore(config.checkpoint_dir, keep=2)
        self.trainer = Trainer(trainer_port)
        self.buffer = TrappedBuffer(config, FilePromptSource(config))
        self.buffer.trap = trap
        self.first_state = copy.deepcopy(self.buffer.state_dict())

    async def run(self) -> None:
        client = TrappedClient(f"http://127.0.0.1:{self.engine_port}", max_in_flight=64, timeout_s=60)
        client.trap = self.trap
        async with client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                while True:
                    with contextlib.suppress(TrainerLost):  # as Cluster.restart_trainers: back to the checkpoint
                        await self.train_from(self.restore())
                        return

    def restore(self) -> int:
        """Trainer and buffer as the newest checkpoint has them; returns its finished steps."""
        if not (self.config.checkpoint_dir / "latest").is_file():
            self.trainer.load([])
            self.buffer.load_state_dict(copy.deepcopy(self.first_state))
            return 0
        folder, meta = self.store.latest()
        self.trainer.load(saved_trained(folder))
        self.buffer.load_state_dict(load_state(folder / "buffer.json"))
        return meta.step

    async def train_from(self, start: int) -> None:
        """Take, train, commit, save, new weights."""
        config = self.config
        serve(config, start)
        production: Any
        if config.asynchrony.is_continuous:
            production = ContinuousProduction(config, self.buffer, start)
        else:
            production = SteppedProduction(config, self.buffer, group_loop, start)
        try:
            for step in range(start, NUM_STEPS):
                production.submit_through(step + config.rollout.rollout_ahead)
                output = await production.take(step)
                for group in output.groups:
                    await asyncio.sleep(TOKEN_S)  # production goes on meanwhile
                    self.trainer.train((step, group.group_index, group.epoch, group.source_index))
                    self.trap.pass_by("train")
                self.buffer.commit(step)
                if (step + 1) % 3 == 0 or step + 1 == NUM_STEPS:
                    self.save(step + 1)
                serve(config, step + 1)
                production.weights_are(step + 1)
        finally:
            await production.close()

    def save(self, step: int) -> None:
        def fill(folder: Path) -> None:
            self.trainer.save(folder / "model" / "trained.json")
            self.trap.pass_by("save model")
            save_state(folder / "buffer.json", self.buffer.state_dict())
            self.trap.pass_by("save buffer")

        self.store.write(CheckpointMeta(step=step, model_type="scripted", num_parameters_shape="0"), fill)


def version_file(config: Config) -> Path:
    return config.run_dir.parent / "version"


def serve(config: Config, version: int) -> None:
    """Let the engine have the weights of `version`."""
    path = version_file(config)
    aside = path.with_suffix(".new")
    aside.write_text(str(version))
    aside.rename(path)


def child(config: Config, trap: Trap, engine_port: int, trainer_port: int) -> None:
    write = checkpoint._write_atomic

    def renamed_but_not_named_yet(path: Path, text: str) -> None:
        trap.pass_by("save done")
        write(path, text)

    checkpoint._write_atomic = renamed_but_not_named_yet
    asyncio.run(Driver(config, trap, engine_port, trainer_port).run())


def choose_trap(rng: random.Random) -> Trap:
    """Half of the time none, so that the parent's clock decides."""
    if rng.random() < 0.5:
        return Trap()
    place = rng.choice(PLACES)
    return Trap(place, rng.randint(1, 6) if place.startswith("save") else rng.randint(1, 60))


def finish(config: Config, rng: random.Random | None, most_kills: int) -> tuple[Path, Counter[str]]:
    """(last checkpoint of the finished run, kills by place or victim). Without `rng` nothing is killed."""
    context = multiprocessing.get_context("fork")  # imports are done; a new interpreter for each kill takes seconds
    engine = Server("engine", functools.partial(engine_app, version_file(config)))
    trainer = Server("trainer", trainer_app)
    kills: Counter[str] = Counter()
    serve(config, 0)
    try:
        while True:
            trap = choose_trap(rng) if rng is not None and kills.total() < most_kills else Trap()
            process = context.Process(target=child, args=(config, trap, engine.port, trainer.port))
            process.start()
            clock_rng = rng if trap.place is None else None
            kills += watch(process, [engine, trainer], clock_rng, most_kills - kills.total())
            if process.exitcode == -signal.SIGKILL:
                kills[trap.place or "driver"] += 1
            elif process.exitcode != 0:
                raise ValueError(f"the run ended with exit code {process.exitcode} after {kills.total()} kills")
            else:
                return CheckpointStore(config.checkpoint_dir, keep=2).latest()[0], kills
    finally:
        engine.close()
        trainer.close()


def watch(driver: Any, servers: list[Server], rng: random.Random | None, most_kills: int) -> Counter[str]:
    """Keep the servers running until the driver ends. With `rng`, kill one of them, or the driver, now and then.

    Returns the kills of servers.
    """
    kills: Counter[str] = Counter()
    next_kill = time.monotonic() + (rng.expovariate(1 / CLOCK_S) if rng else math.inf)
    while driver.is_alive():
        for server in servers:
            server.keep_alive()
        driver.join(0.01)
        if rng is None or time.monotonic() < next_kill or kills.total() >= most_kills:
            continue
        next_kill = time.monotonic() + rng.expovariate(1 / CLOCK_S)
        victim = rng.choice([None, *servers])
        if victim is not None:
            victim.kill()
            kills[victim.name] += 1
        elif driver.is_alive():
            os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    return kills


def faults(config: Config, folder: Path, expected: Trained | None) -> tuple[int, int]:
    """(lost, twice) of a finished run; see the top."""
    trained = saved_trained(folder)
    lost, twice = account(config, load_state(folder / "buffer.json")["ledger"], trained, is_dropped)
    if expected is not None:
        lost += len({entry[1:] for entry in expected} - {entry[1:] for entry in trained})
    return lost, twice


def kill_scripted_runs(num_kills: int, rng: random.Random) -> tuple[int, int, int]:
    """(kills, lost, twice), going round the modes."""
    kills: Counter[str] = Counter()
    lost = twice = runs = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        expected: dict[str, Trained] = {}
        while kills.total() < num_kills:
            name = list(MODES)[runs % len(MODES)]
            mode = MODES[name]
            if mode.is_fixed and name not in expected:
                whole, _ = finish(config_for(Path(root) / f"{runs}_whole", mode), None, 0)
                expected[name] = saved_trained(whole)
            config = config_for(Path(root) / f"{runs}_killed", mode)
            folder, taken = finish(config, rng, min(num_kills - kills.total(), KILLS_PER_RUN))
            run_lost, run_twice = faults(config, folder, expected.get(name))
            same = f", same groups in each step: {saved_trained(folder) == expected[name]}" if mode.is_fixed else ""
            kills, lost, twice, runs = kills + taken, lost + run_lost, twice + run_twice, runs + 1
            print(f"{name}: {taken.total()} kills, lost {run_lost}, twice {run_twice}{same}", flush=True)
    places = ", ".join(f"{place} {count}" for place, count in sorted(kills.items()))
    print(
        f"{runs} scripted runs of {NUM_STEPS} steps in {time.monotonic() - started:.0f} s; kills: {places}", flush=True
    )
    return kills.total(), lost, twice


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--real", type=int, default=12, help="kills of real runs among them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    scripted = kill_scripted_runs(max(0, args.kills - args.real), rng)
    real = kill_real_runs(args.real, rng) if args.real else (0, 0, 0)
    kills, lost, twice = (a + b for a, b in zip(scripted, real, strict=True))
    print(f"kills={kills} lost={lost} twice={twice}")
    return 0 if lost == twice == 0 else 1


if __name__ == "__main__":
    sys.modules["benchmarks.chaos_buffer"] = sys.modules["__main__"]  # the filter is found by this name
    sys.exit(main())
