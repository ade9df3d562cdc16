"""A run that is killed and resumed trains on the same prompts, and to the same loss values bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e_runs import LIMIT_S, start_train, train_metrics

from slime_rl.buffer.dumps import RolloutDumps
from slime_rl.types import Group, Sample, Status

NUM_STEPS, KILLS = 20, (5, 9, 13)  # the last well before the end, which must not come first
LOSS_VALUES = ("train/loss", "train/pg_loss", "train/grad_norm", "train/kl_loss", "train/logprob_diff_mean_abs")


def write_rollouts(folder: Path) -> None:
    """Twenty steps of 4 groups x 2 samples with random tokens, log-probs and rewards, as a run would have dumped."""
    rng = random.Random(0)
    for step in range(NUM_STEPS):
        groups = []
        for number in range(step * 4, step * 4 + 4):
            samples = []
            for index in (2 * number, 2 * number + 1):
                sample = Sample(index=index, group_index=number, rollout_id=index, prompt=f"prompt {number}")
                sample.set_prompt_tokens([rng.randrange(3, 15) for _ in range(4)])
                n = rng.randrange(2, 9)
                tokens = [rng.randrange(3, 15) for _ in range(n)]
                sample.append_tokens(tokens, log_probs=[-rng.uniform(1, 4) for _ in tokens], versions=[step] * n)
                sample.reward, sample.status = float(rng.random() < 0.5), Status.COMPLETED
                samples.append(sample)
            groups.append(Group(group_index=number, source_index=number, epoch=0, samples=samples))
        RolloutDumps(folder).write(step, groups)


def run_until(flags: list[str], folder: Path, finished: int | None) -> None:
    """Run to the end, or kill -9 the driver once `finished` steps are in metrics.jsonl."""
    process = start_train(flags, folder / "log")
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < deadline, (folder / "log").read_text()
        if finished is not None and metrics.exists() and metrics.read_text().count('"train/loss"') >= finished:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.05)
    assert finished is None and process.returncode == 0, (folder / "log").read_text()


def test_losses_of_a_run_that_was_killed_three_times_are_the_same_bit_for_bit(
    quickstart_data: Path, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "rollouts")
    losses: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, kills: tuple[int, ...]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        flags = [
            *("--hf-checkpoint", str(quickstart_data / "model"), "--load-rollouts", str(tmp_path / "rollouts")),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-steps", str(NUM_STEPS)),
            *("--lr", "1e-3", "--lr-decay-style", "cosine", "--use-kl-loss", "--kl-loss-coef", "0.1"),
            *("--num-updates-per-rollout", "2", "--run-dir", str(folder / "run"), "--save-interval", "3"),
        ]
        for finished in (*kills, None):
            checkpoints = folder / "run" / "checkpoints"
            resume = ["--load", str(checkpoints)] if checkpoints.exists() else []
            run_until([*flags, *resume], folder, finished)
        lines = train_metrics(folder / "run")
        assert [line["step"] for line in lines] == list(range(NUM_STEPS))
        losses[name] = [{key: line[key] for key in LOSS_VALUES} for line in lines]

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, ("whole", "killed"), ((), KILLS)))
    assert losses["killed"] == losses["whole"]
    assert len({json.dumps(values) for values in losses["whole"]}) == NUM_STEPS
