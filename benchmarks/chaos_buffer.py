"""Kill a run again and again: is every prompt trained exactly once?

    python benchmarks/chaos_buffer.py --kills 200 --seed 7
    python benchmarks/chaos_buffer.py --kills 200 --real 4      four of the kills hit real runs (a minute each)

A scripted run is a child process with the real prompt source, ledger buffer, production (synchronous, one step off,
fully asynchronous, with partial rollouts, with a byte budget that spills) and checkpoint store; engine, reward and
trainer are scripted (the "model" is the list of groups it has trained on). Half of the kills come from the parent at
random moments, half strike at a random visit of a place that the child passes: generate, admit, take, train, commit,
and three moments of a save. All are SIGKILL. Then the run starts again from its newest checkpoint.

After its last step, a run's trained groups are compared with the order of its prompts. lost: groups that have neither
trained nor been dropped by the filter nor still wait in the last checkpoint, or that an uninterrupted run trains and
this one does not (modes whose order is fixed). twice: trainings of a prompt beyond the first within an epoch.
--real N: see benchmarks/chaos_real.py. Last line: `kills=… lost=… twice=…`; exit code 1 unless both are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

from benchmarks.chaos_real import kill_real_runs  # noqa: E402
from benchmarks.scripted_rollout import CharTokenizer, ScriptedClient, scripted_config  # noqa: E402
from slime_rl.buffer.ledger import Ledger  # noqa: E402
from slime_rl.buffer.ledger_buffer import LedgerBuffer  # noqa: E402
from slime_rl.buffer.sources import FilePromptSource  # noqa: E402
from slime_rl.cluster import checkpoint  # noqa: E402
from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore  # noqa: E402
from slime_rl.config import Config  # noqa: E402
from slime_rl.data.state_files import load_state, save_state  # noqa: E402
from slime_rl.rollout.client import Generation  # noqa: E402
from slime_rl.rollout.continuous import ContinuousProduction  # noqa: E402
from slime_rl.rollout.group_loop import group_loop  # noqa: E402
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime  # noqa: E402
from slime_rl.rollout.stepped import SteppedProduction  # noqa: E402
from slime_rl.types import Group, Sample  # noqa: E402

NUM_STEPS, BATCH, NUM_PROMPTS, KILLS_PER_RUN = 60, 4, 23, 12
TOKEN_S = 0.0003
PLACES = ("generate", "admit", "take", "train", "commit", "save model", "save buffer", "save done")
Trained = list[tuple[int, int, int, int]]  # (step, group_index, epoch, row)


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


class TrappedClient(ScriptedClient):
    def __init__(self, trap: Trap) -> None:
        super().__init__(lambda prompt: 1 + sum(prompt) % 17, slots=64, token_s=TOKEN_S)
        self.trap = trap

    async def _generate(
        self, request_id: str, input_ids: list[int], sampling_params: dict[str, Any], routing_key: str | None
    ) -> Generation:
        generation = await super()._generate(request_id, input_ids, sampling_params, routing_key)
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


async def run(config: Config, trap: Trap) -> None:
    """Train every remaining step, in the order of `slime_rl.train`: take, train, commit, new weights, save."""
    store = CheckpointStore(config.checkpoint_dir, keep=2)
    buffer = TrappedBuffer(config, FilePromptSource(config))
    buffer.trap = trap
    trained: Trained = []
    start = 0
    if (config.checkpoint_dir / "latest").is_file():
        folder, meta = store.latest()
        buffer.load_state_dict(load_state(folder / "buffer.json"))
        trained, start = saved_trained(folder), meta.step
    client = TrappedClient(trap)
    client.serve(start)
    with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
        production: Any
        if config.asynchrony.fully_async:
            production = ContinuousProduction(config, buffer, start)
        else:
            production = SteppedProduction(config, buffer, group_loop, start)
        for step in range(start, NUM_STEPS):
            production.submit_through(step + config.rollout.rollout_ahead)
            output = await production.take(step)
            for group in output.groups:
                await asyncio.sleep(TOKEN_S)  # production goes on meanwhile
                trained.append((step, group.group_index, group.epoch, group.source_index))
                trap.pass_by("train")
            buffer.commit(step)
            client.serve(step + 1)
            production.weights_are(step + 1)
            if (step + 1) % 3 == 0 or step + 1 == NUM_STEPS:
                save(store, step + 1, trained, buffer, trap)
        await production.close()
    await client.close()


def save(store: CheckpointStore, step: int, trained: Trained, buffer: LedgerBuffer, trap: Trap) -> None:
    def fill(folder: Path) -> None:
        (folder / "model" / "trained.json").write_text(json.dumps(trained))
        trap.pass_by("save model")
        save_state(folder / "buffer.json", buffer.state_dict())
        trap.pass_by("save buffer")

    store.write(CheckpointMeta(step=step, model_type="scripted", num_parameters_shape="0"), fill)


def child(config: Config, trap: Trap) -> None:
    write = checkpoint._write_atomic

    def renamed_but_not_named_yet(path: Path, text: str) -> None:
        trap.pass_by("save done")
        write(path, text)

    checkpoint._write_atomic = renamed_but_not_named_yet
    asyncio.run(run(config, trap))


def choose_trap(rng: random.Random) -> Trap:
    """Half of the time none, so that the parent's clock decides."""
    if rng.random() < 0.5:
        return Trap()
    place = rng.choice(PLACES)
    return Trap(place, rng.randint(1, 6) if place.startswith("save") else rng.randint(1, 60))


def finish(config: Config, rng: random.Random | None, most_kills: int) -> tuple[Path, Counter[str]]:
    """(last checkpoint of the finished run, kills by place). Without `rng` nothing is killed."""
    context = multiprocessing.get_context("fork")  # imports are done; a new interpreter for each kill takes seconds
    kills: Counter[str] = Counter()
    while True:
        may_kill = rng is not None and kills.total() < most_kills
        trap = choose_trap(rng) if rng is not None and may_kill else Trap()
        process = context.Process(target=child, args=(config, trap))
        process.start()
        if rng is not None and may_kill and trap.place is None:
            process.join(rng.expovariate(1 / 0.25))
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL and may_kill:
            kills[trap.place or "anywhere"] += 1
        elif process.exitcode != 0:
            raise ValueError(f"the run ended with exit code {process.exitcode} after {kills.total()} kills")
        else:
            return CheckpointStore(config.checkpoint_dir, keep=2).latest()[0], kills


def faults(config: Config, folder: Path, expected: Trained | None) -> tuple[int, int]:
    """(lost, twice) of a finished run; see the top."""
    trained = saved_trained(folder)
    ledger = Ledger()
    ledger.load_state_dict(load_state(folder / "buffer.json")["ledger"])
    source = FilePromptSource(config)
    order = [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(ledger.next_group_index)]
    counts = Counter((epoch, row) for _, _, epoch, row in trained)
    lost = 0
    for group_index, prompt in enumerate(order):
        state = ledger.state_of(group_index)
        is_there = counts[prompt] > 0 if state == "committed" else state != "dropped" or is_dropped(group_index)
        lost += not is_there
    wrong = sum(order[group_index] != (epoch, row) for _, group_index, epoch, row in trained)
    if expected is not None:
        lost += len({entry[1:] for entry in expected} - {entry[1:] for entry in trained})
    return lost + wrong + (NUM_STEPS * BATCH - len(trained)), sum(count - 1 for count in counts.values())


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
    parser.add_argument("--real", type=int, default=0, help="kills of real runs among them")
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
