"""Compute a dumped training step again and compare every number with what was logged.

    python tools/replay_step.py RUN_DIR [STEP]
    python tools/replay_step.py RUN_DIR/train_dumps/step_00000012/policy_epoch0_update0

Dumps are written for steps named by --dump-train-steps, and always where a loss or gradient is not finite. The replay
starts as many worker processes as the run had, for the critic and then for the policy; it needs --hf-checkpoint where
it was. Exits with 1 when a number differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import sys
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.observability.tracker import read_jsonl
from slime_rl.trainer.replay import find_updates, make_worker, replay_update, role, world_size

WORKER_TIMEOUT_S = 600


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="run folder, or the folder of a dumped step or update")
    parser.add_argument("step", type=int, nargs="?", help="which step, where several were dumped")
    arguments = parser.parse_args(argv)
    try:
        folders = find_updates(arguments.path, arguments.step)
        replays = [replay for _, same in groupby(folders, role) for replay in run_workers(list(same))]
    except (ValueError, RuntimeError) as error:
        print(f"replay_step: {error}", file=sys.stderr)
        return 2
    exact = [print_update(replay) for replay in replays]
    try:
        print_step(arguments.path, replays)
    except ValueError as error:  # a damaged metrics.jsonl changes nothing of what was computed
        print(f"replay_step: {error}", file=sys.stderr)
    print(f"updates={len(replays)} exact={sum(exact)}")
    return 0 if all(exact) else 1


def run_workers(folders: list[Path]) -> list[Any]:
    """The replay of every update, all of one model, as the last pipeline stage sees it."""
    size = world_size(folders[0])
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [context.Process(target=work, args=(folders, rank, port, results)) for rank in range(size)]
    for worker in workers:
        worker.start()
    try:
        answers = [next_answer(workers, results) for _ in workers]
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return merge([answer for _, answer in sorted(answers)])


def next_answer(workers: list[Any], results: Any) -> Any:
    """What the next worker puts there.

    Raises:
        RuntimeError: one of them ended without an answer, or takes too long.
    """
    for _ in range(WORKER_TIMEOUT_S):
        died = [f"rank {rank} ended with exit code {w.exitcode}" for rank, w in enumerate(workers) if w.exitcode]
        try:
            return results.get(timeout=1)
        except queue.Empty:  # asked once more after its end, since an answer may still have been on its way
            if died:
                raise RuntimeError(f"{', '.join(died)}; -9 is mostly the machine's memory") from None
    raise RuntimeError(f"no answer of a worker within {WORKER_TIMEOUT_S} s")


def work(folders: list[Path], rank: int, port: int, results: Any) -> None:
    warnings.filterwarnings("ignore")
    try:
        worker = make_worker(folders[0], rank, port)
        replays = [replay_update(worker, folder) for folder in folders]
        worker.shutdown()
        results.put((rank, replays))
    except Exception as error:  # shown by the parent
        results.put(error if isinstance(error, ValueError) else RuntimeError(f"rank {rank}: {error!r}"))


def merge(per_rank: list[list[Any]]) -> list[Any]:
    """Update by update, rank 0's metrics with the micro-batches of every rank that has the loss."""
    merged = []
    for ranks in zip(*per_rank, strict=True):
        first = ranks[0]
        first.record["micro_batches"] = [part for r in ranks for part in r.record["micro_batches"]]
        first.micro_batch_losses[:] = [loss for r in ranks for loss in list(r.micro_batch_losses)]
        merged.append(first)
    return merged


def print_update(replay: Any) -> bool:
    """Whether all of it came out as logged."""
    record = replay.record
    print(f"\n{record['role']}, step {record['step']}, epoch {record['epoch']}, update {record['update']}")
    same = True
    for part, loss in zip(record["micro_batches"], replay.micro_batch_losses, strict=True):
        same &= equal(part["loss"], loss)
        print(f"  micro-batch {part['index']}: loss {part['loss']} -> {loss}  samples {part['samples']}")
    for name, logged in record["metrics"].items():
        same &= equal(logged, replay.metrics[name])
        print(f"  {name:<28} {logged} -> {replay.metrics[name]}")
    if record["problem"] is not None or replay.problem is not None:
        same &= record["problem"] == replay.problem
        print(f"  logged:   {record['problem']}\n  replayed: {replay.problem}")
    print("  every number is the same" if same else "  NOT the same")
    return same


def equal(logged: float | str, now: float) -> bool:
    return float(logged) == now or (float(logged) != float(logged) and now != now)  # NaN is unlike itself


def print_step(path: Path, replays: list[Any]) -> None:
    """The step's loss, which is the mean over its updates, beside the one in metrics.jsonl."""
    losses = [r.metrics["loss"] for r in replays if "loss" in r.metrics]
    file = path / "metrics.jsonl"
    if not losses or not file.is_file():
        return
    step, name = replays[0].record["step"], "train/loss"
    logged = [line[name] for line in read_jsonl(file) if line["step"] == step and name in line]
    print(f"\nstep {step}: {name} {logged[-1] if logged else 'not logged'} -> {sum(losses) / len(losses)}")


if __name__ == "__main__":
    sys.exit(main())
