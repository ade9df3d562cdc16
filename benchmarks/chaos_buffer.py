"""Kill a run again and again: is every prompt trained exactly once?

    python benchmarks/chaos_buffer.py --kills 200 --seed 7

The run is a child process with the real prompt source, ledger buffer, group loop and checkpoint store; engine, reward
and trainer are scripted (the "model" is the list of groups it has trained on). The parent kills it with SIGKILL at
random moments, during generation, admission, take, training and saving, and starts it again from its newest
checkpoint. Modes: synchronous, one step off, and one step off with a byte budget that spills. Last line, against an
uninterrupted run: `kills=… lost=… twice=…`; exit code 1 unless both are 0.
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
from pathlib import Path
from typing import Any

from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore
from slime_rl.config import Config, parse_config
from slime_rl.data.state_files import load_state, save_state
from slime_rl.rollout.group_loop import group_loop
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.types import RolloutOutput, Sample, Status

NUM_STEPS, BATCH, NUM_PROMPTS, KILLS_PER_RUN = 60, 4, 23, 25
Trained = list[tuple[int, int, int, int]]  # (step, group_index, epoch, row)


class CharTokenizer:
    """One token per character; enough for a scripted engine."""

    chat_template = None
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]


async def generate(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A scripted engine: some tokens after a short while."""
    n = 1 + sample.index % 5
    for _ in range(n):
        await asyncio.sleep(0.0003)
    sample.append_tokens([7] * n, log_probs=[-0.5] * n, versions=[0] * n)
    sample.status, sample.response = Status.COMPLETED, "x" * n
    return sample


async def reward(config: Config, group: list[Sample]) -> list[float]:
    return [float(sample.index % 2) for sample in group]


def drop_some(config: Config, group: list[Sample]) -> str | None:
    """Which groups are dropped depends on the group alone, so that two runs can be compared."""
    return "every_seventh" if group[0].group_index % 7 == 3 else None


def config_for(folder: Path, *flags: str) -> Config:
    (folder / "config.json").write_text("{}")
    rows = [{"prompt": f"prompt {i}", "label": str(i)} for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = Path(__file__).stem
    return parse_config(
        [
            *("--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl")),
            *("--run-dir", str(folder / "run"), "--no-apply-chat-template"),
            *("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "2", "--num-steps", str(NUM_STEPS)),
            *("--generate-function-path", f"{module}:generate", "--reward-function-path", f"{module}:reward"),
            *("--dynamic-filter-path", f"{module}:drop_some", *flags),
        ]
    )


async def run(config: Config) -> None:
    """Train every remaining step, in the order of `slime_rl.train`: take, train, commit, save."""
    store = CheckpointStore(config.checkpoint_dir, keep=2)
    buffer = LedgerBuffer(config, FilePromptSource(config))
    trained: Trained = []
    start = 0
    if (config.checkpoint_dir / "latest").is_file():
        folder, meta = store.latest()
        buffer.load_state_dict(load_state(folder / "buffer.json"))
        trained, start = json.loads((folder / "model" / "trained.json").read_text()), meta.step
    tasks: dict[int, asyncio.Task[RolloutOutput]] = {}

    async def produce(step: int) -> RolloutOutput:
        if step - 1 in tasks:
            await tasks[step - 1]
        return await group_loop(config, step, buffer)

    for step in range(start, NUM_STEPS):
        for ahead in range(step, min(step + config.rollout.rollout_ahead, NUM_STEPS - 1) + 1):
            if ahead not in tasks:
                tasks[ahead] = asyncio.create_task(produce(ahead))
        output = await tasks[step]
        for group in output.groups:
            await asyncio.sleep(0.0003)  # training; production goes on meanwhile
            trained.append((step, group.group_index, group.epoch, group.source_index))
        buffer.commit(step)

        def fill(folder: Path) -> None:
            (folder / "model" / "trained.json").write_text(json.dumps(trained))
            save_state(folder / "buffer.json", buffer.state_dict())

        if (step + 1) % 3 == 0 or step + 1 == NUM_STEPS:
            store.write(CheckpointMeta(step=step + 1, model_type="scripted", num_parameters_shape="0"), fill)


def child(config: Config) -> None:
    with use_runtime(RolloutRuntime(client=None, tokenizer=CharTokenizer())):
        asyncio.run(run(config))


def finish(config: Config, rng: random.Random | None, kills_left: int) -> tuple[Trained, int]:
    """(what the finished run trained on, kills it took). Without `rng` nothing is killed."""
    context = multiprocessing.get_context("fork")  # imports are done; a new interpreter for each kill takes seconds
    kills = 0
    while True:
        process = context.Process(target=child, args=(config,))
        process.start()
        if rng is not None and kills < kills_left:
            process.join(rng.expovariate(1 / 0.15))
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills += 1
                continue
        process.join()
        if process.exitcode != 0:
            raise ValueError(f"the run ended with exit code {process.exitcode} after {kills} kills")
        folder, _ = CheckpointStore(config.checkpoint_dir, keep=2).latest()
        return json.loads((folder / "model" / "trained.json").read_text()), kills


MODES = {
    "sync": (),
    "one step off": ("--rollout-ahead", "1"),
    "spilling": ("--rollout-ahead", "1", "--buffer-memory-bytes", "4000"),
}


def compare(expected: Trained, trained: Trained) -> tuple[int, int]:
    """(prompts of the uninterrupted run that never trained, trainings beyond the first of a prompt in an epoch)."""
    counts = Counter((epoch, row) for _, _, epoch, row in trained)
    wanted = {(epoch, row) for _, _, epoch, row in expected}
    return len(wanted - counts.keys()), sum(count - 1 for count in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    kills = lost = twice = runs = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        expected: dict[str, Trained] = {}
        while kills < args.kills:
            mode = list(MODES)[runs % len(MODES)]
            for name in ("whole", "killed"):
                (Path(folder) / f"{runs}_{name}").mkdir()
            if mode not in expected:
                expected[mode], _ = finish(config_for(Path(folder) / f"{runs}_whole", *MODES[mode]), None, 0)
            config = config_for(Path(folder) / f"{runs}_killed", *MODES[mode])
            trained, taken = finish(config, rng, min(args.kills - kills, KILLS_PER_RUN))
            run_lost, run_twice = compare(expected[mode], trained)
            same = sorted(trained) == sorted(expected[mode])
            kills, lost, twice, runs = kills + taken, lost + run_lost, twice + run_twice, runs + 1
            print(
                f"{mode}: {taken} kills, lost {run_lost}, twice {run_twice}, same groups in each step: {same}",
                flush=True,
            )
    print(f"{runs} runs of {NUM_STEPS} steps in {time.monotonic() - started:.0f} s")
    print(f"kills={kills} lost={lost} twice={twice}")
    return 0 if lost == twice == 0 else 1


if __name__ == "__main__":
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]  # plugins are found by the module's name
    sys.exit(main())
