"""One training step: from a worker's share of the rollout batch to updated weights.

batch ─► shard ─┬─► old log-probs (unless the current policy is the old one)
                ├─► reference log-probs (when a KL needs them)
                └─► gather the global batch ─► advantages ─► token weights, per optimizer update
                                                                  │
   for every epoch and update: micro-batches ─► forward/backward ◄┘─► check ─► clip ─► optimizer ─► schedule
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_rl.algorithms.registry import ADVANTAGES, OFF_POLICY, POLICY_LOSSES
from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch
from slime_rl.trainer import optimizer as optim
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.forward import run
from slime_rl.trainer.gather import GlobalBatch, gather_global
from slime_rl.trainer.head import HeadSpec
from slime_rl.trainer.log_probs import response_log_probs
from slime_rl.trainer.loss import (
    LossInputs,
    MicroBatchLoss,
    check_finite,
    check_grad_norm,
    finish_gap,
    gap_parts,
    reduce_metrics,
)
from slime_rl.trainer.packing import MicroBatch, make_micro_batch, split_rows
from slime_rl.trainer.reference import ReferenceWeights
from slime_rl.trainer.shard import Shard, make_shard
from slime_rl.trainer.timing import PhaseTimer

NEEDS_OLD_BEFORE = ("clip_cov", "kl_cov")  # choose tokens of the whole update by their old log-probs


@dataclass
class TrainState:
    """What a training step works on. The modules and the optimizer change in place."""

    config: Config
    layout: Layout
    device: torch.device
    models: list[Any]  # DDP-wrapped chunks of this pipeline stage
    optimizer: Any
    scheduler: Any
    head: HeadSpec
    hidden_size: int
    reference: ReferenceWeights | None

    @property
    def sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel


def train_step(state: TrainState, step: int, batch: RolloutBatch) -> dict[str, float]:
    """Run every update of the step; the metrics are the same on every rank.

    Raises:
        ValueError: a batch that does not fit, or a plugin that returned something else than it must.
        NonFiniteError: a loss or gradient is NaN or infinite.
    """
    config, timer = state.config, PhaseTimer(state.device)
    shard = make_shard(config, batch, state.device)
    all_rows = list(range(len(shard.sample_ids)))
    token_fields, is_sft = (
        {"mask": shard.mask, "rollout_log_probs": shard.rollout_log_probs},
        config.train.loss == "sft",
    )
    if needs_old_pass(config):
        with timer.phase("log_probs"):
            token_fields["old_log_probs"] = pass_log_probs(state, shard, make_micro_batches(state, shard, all_rows))
    elif config.algorithm.old_log_probs == "rollout" and not is_sft:
        token_fields["old_log_probs"] = shard.rollout_log_probs
    if state.reference is not None:
        with timer.phase("ref_log_probs"), state.reference.swapped_into(state.models):
            token_fields["ref_log_probs"] = pass_log_probs(state, shard, make_micro_batches(state, shard, all_rows))
    with timer.phase("advantages"):
        whole = gather_global(shard, token_fields, shard.num_samples, state.layout.dp)
        advantages = None
        if not is_sft:
            advantages = whole.advantages(config, ADVANTAGES.load(config.algorithm.advantage_estimator))
        inputs = _loss_inputs(config, shard, whole, advantages, token_fields)
    metrics = _run_updates(state, step, shard, inputs, timer)
    return _report(metrics, whole, advantages, inputs, needs_old_pass(config), timer)


def needs_old_pass(config: Config) -> bool:
    """Whether old log-probs take a forward pass of their own before the update."""
    algorithm, train = config.algorithm, config.train
    if train.loss == "sft" or algorithm.old_log_probs == "rollout":
        return False
    one_update = train.num_updates_per_rollout * train.num_epochs_per_rollout == 1
    needed_before = algorithm.kl_coef > 0 or algorithm.policy_loss in NEEDS_OLD_BEFORE
    return algorithm.old_log_probs == "recompute" or not one_update or needed_before


def make_micro_batches(state: TrainState, shard: Shard, rows: list[int]) -> list[MicroBatch]:
    """Packed micro-batches of the given rows, as many on every data-parallel worker. Collective over dp."""
    lengths = shard.sequences.lengths
    parts = split_rows(rows, lengths, state.config.train, state.layout, state.hidden_size, state.device)
    return [
        make_micro_batch(i, part, shard.sequences, state.layout, state.sequence_parallel, state.device)
        for i, part in enumerate(parts)
    ]


def pass_log_probs(state: TrainState, shard: Shard, micro_batches: list[MicroBatch]) -> Tensor:
    """`[t]` float32 log-probs of the worker's response tokens under the current weights."""
    return response_log_probs(
        state.models,
        micro_batches,
        len(shard.mask),
        state.head,
        state.layout,
        sequence_parallel=state.sequence_parallel,
        device=state.device,
    )


def _loss_inputs(
    config: Config, shard: Shard, whole: GlobalBatch, advantages: Tensor | None, token_fields: dict[str, Tensor]
) -> LossInputs:
    weights, selected = whole.per_update(config, advantages)
    own = whole.own_tokens
    return LossInputs(
        mask=shard.mask,
        weights=weights[own],
        rollout_log_probs=shard.rollout_log_probs,
        old_log_probs=token_fields.get("old_log_probs"),
        ref_log_probs=token_fields.get("ref_log_probs"),
        advantages=torch.zeros_like(shard.mask) if advantages is None else advantages[own],
        weight_versions=shard.weight_versions,
        teacher_log_probs=shard.teacher_log_probs,
        cov_selected=None if selected is None else selected[own],
        version=shard.weight_version,
    )


def _run_updates(
    state: TrainState, step: int, shard: Shard, inputs: LossInputs, timer: PhaseTimer
) -> dict[str, list[float]]:
    """Every metric's values, one per optimizer update."""
    train, collected = state.config.train, defaultdict(list)
    update_ids = shard.update_ids.tolist()
    for epoch in range(train.num_epochs_per_rollout):
        for update in range(train.num_updates_per_rollout):
            rows = [row for row, of in enumerate(update_ids) if of == update]
            first = epoch == 0 and update == 0
            where = f"step {step}, epoch {epoch}, update {update}"
            for name, value in _update(state, shard, rows, inputs, first, where, timer).items():
                collected[name].append(value)
    return collected


def _update(
    state: TrainState, shard: Shard, rows: list[int], inputs: LossInputs, first: bool, where: str, timer: PhaseTimer
) -> dict[str, float]:
    """One optimizer update on `rows` of this worker."""
    algorithm, is_sft = state.config.algorithm, state.config.train.loss == "sft"
    loss = MicroBatchLoss(
        state.config,
        inputs,
        POLICY_LOSSES.load("sft" if is_sft else algorithm.policy_loss),
        None if is_sft else OFF_POLICY.load(algorithm.off_policy_correction),
        measure_gap=first and not is_sft and not needs_old_pass(state.config),
    )
    with timer.phase("forward_backward"):
        micro_batches = make_micro_batches(state, shard, rows)
        optim.zero_grad(state.models, state.optimizer)
        results = run(
            state.models,
            micro_batches,
            loss,
            state.head,
            state.layout,
            sequence_parallel=state.sequence_parallel,
            backward=True,
        )
        check_finite(results, shard.sample_ids, where, state.layout.dp.rank, state.device)
    with timer.phase("optimizer"):
        norm = optim.grad_norm(state.optimizer)
        check_grad_norm(norm, where)
        rate = optim.step(state.models, state.optimizer, state.scheduler)
    metrics = reduce_metrics(results, state.layout, state.device)
    return metrics | {"grad_norm": norm, "lr": rate, "num_microbatches": float(len(micro_batches))}


def _report(
    updates: dict[str, list[float]],
    whole: GlobalBatch,
    advantages: Tensor | None,
    inputs: LossInputs,
    has_old_pass: bool,
    timer: PhaseTimer,
) -> dict[str, float]:
    """Metrics by their public names: means over the step's updates, micro-batches counted together."""
    metrics = {name: sum(values) / len(values) for name, values in updates.items()}
    metrics["num_microbatches"] = sum(updates["num_microbatches"])
    mask = whole.tokens["mask"]
    if has_old_pass:
        gap = gap_parts(whole.tokens["old_log_probs"], whole.tokens["rollout_log_probs"], mask)
        metrics |= finish_gap({name: float(value) for name, value in gap.items()})
    tokens = float(whole.integers["total_lengths"].sum())
    metrics |= {"tokens": tokens, "trained_tokens": float((mask > 0).sum())}
    if advantages is not None:
        kept = advantages[mask > 0]
        metrics["advantages_mean"] = float(kept.mean()) if len(kept) else 0.0
        metrics["advantages_abs_mean"] = float(kept.abs().mean()) if len(kept) else 0.0
    named = {name if "/" in name else f"train/{name}": float(value) for name, value in metrics.items()}
    named |= {f"timing_s/train/{name}": seconds for name, seconds in timer.seconds.items()}
    named["perf/train_tokens_per_s"] = tokens / max(1e-9, sum(timer.seconds.values()))
    return named
