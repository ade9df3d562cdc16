"""What --log-token-training costs the trainer: time inside it, against the time of the whole step.

    python benchmarks/token_log.py        512 samples in 4 updates, a model of 2 layers, 16 samples logged

Last line: `added_ms=… step_ms=… share=…`, medians over steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, open_worker  # noqa: E402


class Stopwatch:
    """Adds up the seconds inside the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def watch(stopwatch: Stopwatch) -> None:
    """Time what the flag adds, in this process; the loss itself is not counted."""
    from slime_rl.trainer import step, token_log, update

    def watched(loss_fn: Callable[..., Any], seen: Any) -> Callable[..., Any]:
        note = stopwatch.timed(token_log.watched(lambda *_: None, seen))  # type: ignore[arg-type]

        def loss(*args: Any) -> Any:
            note(*args)
            return loss_fn(*args)

        return loss

    step.open_log, step.close_log = stopwatch.timed(token_log.open_log), stopwatch.timed(token_log.close_log)
    update.watched = watched


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log-samples", type=int, default=16)
    args = parser.parse_args(argv)
    sizes = {"groups": 64, "samples": 8}
    added, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), num_hidden_layers=2)
        flags = ["--log-samples", str(args.log_samples), "--num-updates-per-rollout", "4"]
        with open_worker(make_config(Path(folder), *flags, "--max-tokens-per-worker", "2048", **sizes)) as worker:
            stopwatch = Stopwatch()
            watch(stopwatch)
            for step in range(args.steps):
                batch = make_batch(step, updates=4, **sizes)
                before, start = stopwatch.seconds, time.perf_counter()
                worker.train(step, batch)
                whole.append(time.perf_counter() - start)
                added.append(stopwatch.seconds - before)
            assert len(worker.token_log()) == args.log_samples
    ms, step_ms = 1000 * median(added[2:]), 1000 * median(whole[2:])
    print(f"added_ms={ms:.3f} step_ms={step_ms:.1f} share={ms / step_ms:.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
