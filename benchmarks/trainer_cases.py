"""Small models, batches and groups of worker processes for the trainer's tests and benchmarks."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny_models import VOCAB_SIZE, make_checkpoint
from slime_rl.config import Config, parse_config
from slime_rl.data.batches import RolloutBatch, split_for_data_parallel
from slime_rl.data.ragged import Ragged
from slime_rl.engine.ports import free_port

START_TIMEOUT_S = 900
__all__ = ["make_checkpoint"]  # used from here by tests of the trainer


def make_config(hf_path: Path, *flags: str, groups: int = 4, samples: int = 3, workers: int = 1) -> Config:
    """A Config for steps of `groups` x `samples`; later flags win over the defaults."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        prompts.write('{"prompt": "1+1=", "label": "2"}\n')
        prompts.flush()
        defaults = {
            "--hf-checkpoint": str(hf_path),
            "--prompt-data": prompts.name,
            "--rollout-batch-size": str(groups),
            "--n-samples-per-prompt": str(samples),
            "--train-num-workers": str(workers),
            "--max-tokens-per-worker": "96",
            "--lr": "1e-3",
            "--device": "cpu",
            "--train-threads-per-worker": "1",
        }
        argv = [part for pair in defaults.items() if pair[0] not in flags for part in pair]
        return parse_config([*argv, *flags])


def only_worker(config: Config) -> Any:
    """A TrainWorker that is the whole group, in this process."""
    from slime_rl.trainer.worker import TrainWorker

    return TrainWorker(config, 0, 1, "127.0.0.1", free_ports(1)[0])


@contextmanager
def open_worker(config: Config) -> Iterator[Any]:
    """`only_worker` for the time of the block."""
    worker = only_worker(config)
    try:
        yield worker
    finally:
        worker.shutdown()


def make_batch(step: int = 0, *, groups: int = 4, samples: int = 3, updates: int = 1, seed: int = 0) -> RolloutBatch:
    """A global batch of random tokens: a prompt a group, responses of 2 to 39, masked tokens, plausible log-probs."""
    generator = torch.Generator().manual_seed(1000 * seed + step)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    count = groups * samples
    prompts = [integers(0, VOCAB_SIZE, int(length)) for length in integers(1, 10, groups)]
    responses = integers(2, 40, count)
    tokens = [torch.cat([prompts[i // samples], integers(0, VOCAB_SIZE, int(r))]) for i, r in enumerate(responses)]
    masks = [(torch.rand(int(r), generator=generator) > 0.2).float() for r in responses]
    log_probs = [-4.8 + 0.3 * torch.randn(int(r), generator=generator) for r in responses]
    tensors: dict[str, Any] = {
        "tokens": Ragged.from_list(tokens, torch.int64),
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(samples),
        "loss_mask": Ragged.from_list(masks, torch.float32),
        "rollout_log_probs": Ragged.from_list(log_probs, torch.float32),
        "weight_versions": Ragged.from_list([torch.full((int(r),), step) for r in responses], torch.int32),
        "rewards": torch.rand(count, generator=generator),
        "group_ids": torch.arange(count) // samples,
        "rollout_ids": torch.arange(count),
        "sample_ids": torch.arange(count),
        "truncated": torch.zeros(count, dtype=torch.bool),
        "update_ids": torch.arange(count) // (count // updates),
    }
    return RolloutBatch(tensors, None, {"step": step, "weight_version": step, "num_samples": count})


@dataclass(frozen=True)
class Job:
    """Steps to train on one group of workers. `shuffle` reorders each worker's samples.

    In this order: export to `save_hf_first`, load, take weights from, train, save, export to `save_hf`.
    """

    config: Config
    batches: list[RolloutBatch]
    shuffle: bool = False
    save_hf_first: Path | None = None
    load: Path | None = None
    load_weights: Path | None = None
    save: Path | None = None
    save_hf: Path | None = None


@dataclass
class Outcome:
    """What rank 0 saw."""

    metrics: list[dict[str, float]] = field(default_factory=list)  # per step, then the log-probs of the last batch
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # Hugging Face names, after the last step
    loaded: dict[str, Any] = field(default_factory=dict)
    token_log: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the last step, of all ranks together


def run_job(job: Job, rank: int, world_size: int, port: int) -> Outcome:
    """Make a worker, run the job's steps, and leave the process group again."""
    from slime_rl.trainer.worker import TrainWorker

    worker = TrainWorker(job.config, rank, world_size, "127.0.0.1", port)
    try:
        if job.save_hf_first:
            worker.save_hf(job.save_hf_first)
        if job.load_weights:
            worker.load_weights(job.load_weights)
        outcome = Outcome(loaded=worker.load(job.load) if job.load else {})
        for batch in job.batches:
            shard = split_for_data_parallel(batch, job.config.data_parallel_size)[worker.data_parallel_rank]
            if job.shuffle:
                order = torch.randperm(len(shard), generator=torch.Generator().manual_seed(7))
                shard = shard.select_rows(order)
            outcome.metrics.append(worker.train(batch.meta_info["step"], shard))
        logs: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(logs, worker.token_log())
        outcome.token_log = {sample: numbers for log in logs for sample, numbers in log.items()}
        if job.save:
            worker.save(job.save, len(job.batches), {"cursor": 17})
        if job.save_hf:
            worker.save_hf(job.save_hf)
        outcome.weights = {name: tensor.clone() for name, tensor in worker.export_weights()}
        return outcome
    finally:
        worker.shutdown()


def run_jobs(jobs: list[Job], world_size: int) -> list[Outcome]:
    """Run jobs one after the other on `world_size` fresh processes; a critic apart takes its share of them.

    Raises:
        RuntimeError: a worker failed; with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    # Picked job by job: a port found free minutes ago may since be the end of somebody's connection.
    ports, barrier, folder = context.Array("i", 2), context.Barrier(world_size), tempfile.TemporaryDirectory()
    workers = [
        context.Process(target=_work, args=(jobs, rank, world_size, ports, barrier, folder.name, results), daemon=True)
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    try:
        outcomes: list[Outcome] = []
        while len(outcomes) < len(jobs):
            outcomes.append(_next_result(results, workers))
        return outcomes
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
        folder.cleanup()


def _next_result(results: Any, workers: list[Any]) -> Outcome:
    for _ in range(START_TIMEOUT_S):
        try:
            kind, value = results.get(timeout=1)
        except queue.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                codes = [worker.exitcode for worker in workers]
                raise RuntimeError(f"worker processes ended with exit codes {codes}") from None
            continue
        if kind == "error":
            raise RuntimeError(value)
        return _from_bytes(value)
    raise RuntimeError(f"no result within {START_TIMEOUT_S} s")


def _work(jobs: list[Job], rank: int, world_size: int, ports: Any, barrier: Any, folder: str, results: Any) -> None:
    from benchmarks.critic_apart import Exchange, run_job_apart

    warnings.filterwarnings("ignore")
    try:
        for number, job in enumerate(jobs):
            barrier.wait(START_TIMEOUT_S)  # everybody has read the ports of the job before
            if rank == 0:
                ports[:] = free_ports(2)
            barrier.wait(START_TIMEOUT_S)
            if job.config.critic_is_apart:
                outcome = run_job_apart(job, rank, ports[:], Exchange(Path(folder, str(number)), barrier))
            else:
                outcome = run_job(job, rank, world_size, ports[0])
            if rank == 0:
                results.put(("outcome", _to_bytes(outcome)))
    except Exception:  # handed to the parent, which raises it
        results.put(("error", f"rank {rank}:\n{traceback.format_exc()}"))


def _to_bytes(outcome: Outcome) -> bytes:
    """Pickled here: a tensor in a multiprocessing queue is a file descriptor that dies with its process."""
    import io

    buffer = io.BytesIO()
    torch.save(vars(outcome), buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Outcome:
    import io

    return Outcome(**torch.load(io.BytesIO(data), weights_only=False))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different; none that the kernel gives to connections meanwhile."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def relative_difference(a: Outcome, b: Outcome) -> float:
    """Largest relative difference of loss and its terms, gradient norm (every step) and weights (per tensor, of its
    largest entry).

    A loss whose terms nearly cancel is compared with the policy term.
    """
    worst = 0.0
    for x, y in zip(a.metrics, b.metrics, strict=True):
        scale = max(abs(y["train/loss"]), abs(y.get("train/pg_loss", 0.0)), 1e-12)
        worst = max(worst, abs(x["train/loss"] - y["train/loss"]) / scale)
        for name in ("train/grad_norm", "train/kl_loss", "train/entropy", "train/value_loss", "critic/grad_norm"):
            if name in y:
                worst = max(worst, abs(x[name] - y[name]) / y[name])
    for name, tensor in b.weights.items():
        difference = (a.weights[name].float() - tensor.float()).abs().max()
        worst = max(worst, float(difference / tensor.float().abs().max()))
    return worst
