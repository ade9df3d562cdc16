"""A job whose critic has workers of its own, on plain processes: what the cluster does through Ray's object store goes
through a folder here.

    ranks 0 .. W-1: policy workers        ranks W .. W+C-1: critic workers (--critic-num-workers C)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trainer_cases import Job, Outcome
from slime_rl.data.batches import TokenFields, split_for_data_parallel
from slime_rl.data.storage import load_batch, save_batch

TIMEOUT_S = 300


@dataclass(frozen=True)
class Exchange:
    """A folder that all processes of a job see, and a barrier for all of them."""

    folder: Path
    barrier: Any

    def put(self, who: str, step: int, fields: TokenFields) -> None:
        save_batch(fields, self.folder / f"{who}_step{step}")

    def get(self, who: str, step: int) -> list[TokenFields]:
        """What all workers of `who` have put; the same samples may be there several times."""
        return [load_batch(path, TokenFields) for path in sorted(self.folder.glob(f"{who}_*_step{step}"))]

    def wait(self) -> None:
        self.barrier.wait(TIMEOUT_S)


def run_job_apart(job: Job, rank: int, ports: list[int], exchange: Exchange) -> Outcome:
    """As `run_job`, for a job with --critic-num-workers; on a rank of either group."""
    from slime_rl.trainer.critic_worker import CriticWorker
    from slime_rl.trainer.worker import TrainWorker

    config, num_policy = job.config, job.config.cluster.train_num_workers
    if rank < num_policy:
        worker = TrainWorker(config, rank, num_policy, "127.0.0.1", ports[0])
    else:
        worker = CriticWorker(config, rank - num_policy, config.critic.critic_num_workers, "127.0.0.1", ports[1])
    try:
        outcome = Outcome(loaded=worker.load(job.load) if job.load else {})
        for batch in job.batches:
            outcome.metrics.append(_step(worker, batch, exchange))
        if job.save:
            worker.save(job.save, len(job.batches), {"cursor": 17})
        if isinstance(worker, TrainWorker):
            outcome.weights = {name: tensor.clone() for name, tensor in worker.export_weights()}
        return outcome
    finally:
        worker.shutdown()


def _step(worker: Any, batch: Any, exchange: Exchange) -> dict[str, float]:
    """One step of this worker; on policy workers with the critic's metrics."""
    config, step, rank = worker.config, batch.meta_info["step"], worker.rank
    is_critic = hasattr(worker, "critic") and not hasattr(worker, "state")
    size = config.critic_data_parallel_size if is_critic else config.data_parallel_size
    shard = split_for_data_parallel(batch, size)[worker.data_parallel_rank]
    if is_critic:
        exchange.put(f"values_{rank}", step, worker.compute_values(shard))
    else:
        exchange.put(f"log_probs_{rank}", step, worker.compute_token_fields(shard))
    exchange.wait()
    given = exchange.get("values", step)
    if not is_critic or config.algorithm.kl_coef > 0:
        given += exchange.get("log_probs", step)
    metrics = worker.train(step, shard, given)
    file = exchange.folder / f"metrics_{step}.json"
    if is_critic and rank == 0:
        file.write_text(json.dumps(metrics))
    exchange.wait()
    return metrics if is_critic else json.loads(file.read_text()) | metrics
