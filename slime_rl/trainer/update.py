"""Optimizer updates: micro-batches ─► forward/backward ─► check (and dump) ─► clip ─► optimizer ─► schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch
from slime_rl.trainer import optimizer as optim
from slime_rl.trainer.dump import UpdateRecord, dump_update, is_due
from slime_rl.trainer.forward import LossFn, run
from slime_rl.trainer.loss import MicroBatchResult, NonFiniteError, Objective, find_problem, is_largest, reduce_metrics
from slime_rl.trainer.shard import Shard
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.timing import PhaseTimer
from slime_rl.trainer.token_log import watched
from slime_rl.trainer.token_pass import make_micro_batches


@dataclass(frozen=True)
class StepData:
    """This worker's share of a step."""

    config: Config  # the run's, which a dump of the critic needs as well
    batch: RolloutBatch
    shard: Shard
    step: int


def run_updates(
    state: TrainState, data: StepData, objective: Objective, timer: PhaseTimer, seen: Tensor | None = None
) -> dict[str, list[float]]:
    """Every update of every epoch of the step; each metric's values, one per update.

    `seen [t]` gets the policy's log-probs of the first epoch: those that each token was first trained with.

    Raises:
        NonFiniteError: a loss or gradient is NaN or infinite; names the dump that was written.
    """
    train, collected = state.config.train, defaultdict(list)
    update_ids = data.shard.update_ids.tolist()
    for epoch in range(train.num_epochs_per_rollout):
        for number in range(train.num_updates_per_rollout):
            rows = [row for row, of in enumerate(update_ids) if of == number]
            record = UpdateRecord(role=objective.role, step=data.step, epoch=epoch, update=number, rows=rows)
            for name, value in _update(state, data, objective, record, timer, None if epoch else seen).items():
                collected[name].append(value)
    return collected


def _update(
    state: TrainState,
    data: StepData,
    objective: Objective,
    record: UpdateRecord,
    timer: PhaseTimer,
    seen: Tensor | None,
) -> dict[str, float]:
    """One optimizer update."""
    with timer.phase("forward_backward"):
        loss_fn = objective.loss_fn(state.config, record.is_first)
        if seen is not None:
            loss_fn = watched(loss_fn, seen)
        results, num_micro_batches = forward_backward(state, data.shard, record.rows, loss_fn)
    with timer.phase("optimizer"):
        metrics = measure(state, results)
        problem = find_problem(results, metrics["grad_norm"], data.shard.sample_ids, state.layout.dp.rank, state.device)
        if problem is not None or is_due(state.config, data.step):
            try:
                folder = dump_update(state, data.config, data.batch, objective, record, results, metrics, problem)
            except OSError as error:
                if problem is None:
                    raise
                raise NonFiniteError(f"{record.where}: {problem}; nothing was updated, and {error}") from error
            if problem is not None:
                raise NonFiniteError(
                    f"{record.where}: {problem}; nothing was updated. To see it again: "
                    f"python tools/replay_step.py {folder}"
                )
        rate = optim.step(state.models, state.optimizer, state.scheduler)
    return metrics | {"lr": rate, "num_microbatches": float(num_micro_batches)}


def forward_backward(
    state: TrainState, shard: Shard, rows: list[int], loss_fn: LossFn
) -> tuple[list[MicroBatchResult], int]:
    """(results on the last pipeline stage, number of micro-batches); leaves the summed gradients in the buffers."""
    micro_batches = make_micro_batches(state, shard, rows)
    state.router_losses.weigh(micro_batches, state.layout, state.sequence_parallel, state.device)
    optim.zero_grad(state.models, state.optimizer)
    return run(state.models, micro_batches, loss_fn, state.head, backward=True), len(micro_batches)


def measure(state: TrainState, results: list[MicroBatchResult]) -> dict[str, float]:
    """Metrics of an update before the optimizer runs, the same on every rank; `grad_norm` among them."""
    return reduce_metrics(results, state.layout, state.device) | {"grad_norm": optim.grad_norm(state.optimizer)}


def public_names(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics as they are reported: under train/ unless they have a place of their own."""
    return {name if "/" in name else f"train/{name}": float(value) for name, value in metrics.items()}


def over_updates(metrics: dict[str, list[float]]) -> dict[str, float]:
    """Each metric's mean over the updates of a step; the maximum of those that are maxima."""
    return {name: max(values) if is_largest(name) else sum(values) / len(values) for name, values in metrics.items()}
