"""Run folders for the dashboard's tests, written by the run's own writers."""

from __future__ import annotations

import math
from pathlib import Path

from factories import make_config

from slime_rl.observability.trace import Trace
from slime_rl.observability.tracker import EVALUATION, make_trackers
from slime_rl.types import Sample, Status

ATTACK = "<img src=x onerror=alert(1)>"


def make_sample(index: int, reward: float, group: int = 7) -> Sample:
    sample = Sample(index=index, group_index=group, rollout_id=index, prompt=f"1+1= {ATTACK}", label="2")
    sample.set_prompt_tokens([1, 2, 3])
    sample.append_tokens([4, 5], log_probs=[-0.1, -2.5], versions=[0, 1])
    sample.append_tokens([6], trained=False)
    sample.response, sample.reward, sample.status = ATTACK, reward, Status.COMPLETED
    return sample


def token_log(number: int) -> dict[str, list[float | None]]:
    """What training saw of `make_sample`: the second token became likelier by a factor of 2."""
    return {
        "train_log_probs": [-0.1, round(-2.5 + math.log(2), 6), None],
        "train_mask": [1.0, 1.0, 0.0],
        "advantages": [0.5 - number, 0.5 - number, 0.0],
    }


def write_run(folder: Path, *flags: str, steps: int = 4) -> Path:
    """A run with two samples of one group and one of another a step, an evaluation, and a trace."""
    config = make_config(folder, "--log-samples", "3", "--lr", "0.125", *flags)
    with make_trackers(config) as trackers:
        trackers.log(0, {"eval/held/accuracy": 0.25})
        trackers.log_samples(0, [make_sample(0, 0.0)], kind=EVALUATION)
        for step in range(steps):
            metrics = {"train/loss": 1.0 / (step + 1), "train/lr": float("nan"), "buffer/reserved": 2.0}
            metrics |= {"timing_s/rollout": 2.4, "timing_s/train": 0.5, "timing_s/other": 0.1, "perf/step_s": 3.0}
            metrics |= {"train/pg_loss": -0.00252 * (step + 1), "train/kl_loss": -123456.0 * step}
            metrics |= {"rollout/staleness_max": 1.0, "rollout/tokens_by_age/0": 0.25, "rollout/tokens_by_age/1": 0.75}
            metrics |= {f"rollout/response_length_p{p}": float(p) for p in (10, 25, 50, 75, 90)}
            trackers.log(step, metrics | {"engines/serving": 2.0, "engines/down": 0.0})
            samples = [make_sample(3 * step, 1.0), make_sample(3 * step + 1, 0.0), make_sample(3 * step + 2, 1.0, 8)]
            trackers.log_samples(step, samples, [["the", "<b>", "!"]] * 3, {0: token_log(0), 1: token_log(1)})
    write_trace(config.run_dir / "trace", steps)
    (config.run_dir / "logs").mkdir()
    (config.run_dir / "logs" / "engine_0.log").write_text("The server is fired up\n")
    (config.run_dir / "logs" / "faults.log").write_text("2026-01-01 engine 0 is down: it has ended\n")
    return config.run_dir


def write_trace(folder: Path, steps: int, requests: int = 12) -> None:
    """Steps of 10 s: 6 s of rollout with overlapping requests, 3 s of training, 1 s of nothing."""
    rollout, trainer = Trace(folder / "rollout.jsonl"), Trace(folder / "trainer_0.jsonl")
    driver = Trace(folder / "driver.jsonl")
    for step in range(steps):
        start = 1000.0 + 10 * step
        for number in range(requests):
            rollout.add("requests", "request", start + number / requests, start + 5 + number / requests, {"tokens": 3})
        driver.add("phases", "rollout", start, start + 6)
        driver.add("phases", "train", start + 6, start + 9)
        trainer.add("training", "forward_backward", start + 6, start + 8.5)
        trainer.add("steps", f"step {step}", start + 6, start + 9)
    for trace in (rollout, trainer, driver):
        trace.close()
