"""The loss of one micro-batch, and from the micro-batches' results to the numbers that are reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch
from slime_rl.algorithms.compose import compose_loss
from slime_rl.algorithms.metrics import finish_metrics, is_maximum, token_metrics
from slime_rl.config import Config
from slime_rl.protocols import OffPolicyFunction, PolicyLossFunction
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.packing import MicroBatch

GAP_SUM, GAP_COUNT, GAP_MAX = "logprob_diff_sum", "logprob_diff_count", "logprob_diff_max_abs"


class NonFiniteError(ValueError):
    """A loss or gradient is NaN or infinite; nothing was updated."""


@dataclass(frozen=True)
class LossInputs:
    """Per response token of this worker `[t]`, beside what the forward pass gives."""

    mask: Tensor  # float32
    weights: Tensor  # float32, from token_weights on the whole update
    rollout_log_probs: Tensor  # float32
    old_log_probs: Tensor | None  # float32; None: the old policy is the current one
    ref_log_probs: Tensor | None  # float32
    advantages: Tensor  # float32
    weight_versions: Tensor  # int64
    teacher_log_probs: Tensor | None  # float32
    cov_selected: Tensor | None  # bool
    version: int


@dataclass(frozen=True)
class MicroBatchResult:
    """What one micro-batch leaves behind on the last pipeline stage."""

    index: int
    rows: list[int]
    parts: dict[str, Tensor]  # scalars, to be summed (or maximised) over micro-batches and workers
    bad_tokens: Tensor  # [T] bool, loss not finite
    sample_ids: Tensor  # [T] int64, 0..n-1


class MicroBatchLoss:
    """Callable for `forward.run`: the weighted loss of one micro-batch, summed."""

    def __init__(
        self,
        config: Config,
        inputs: LossInputs,
        loss_fn: PolicyLossFunction,
        off_policy_fn: OffPolicyFunction | None,
        measure_gap: bool,
    ) -> None:
        self.config, self.inputs, self.loss_fn, self.off_policy_fn = config, inputs, loss_fn, off_policy_fn
        self.measure_gap = measure_gap

    def __call__(self, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, MicroBatchResult]:
        at, inputs = micro_batch.token_index, self.inputs
        if self.config.algorithm.entropy_coef == 0:
            entropy = entropy.detach()
        batch = LossBatch(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs[at],
            rollout_log_probs=inputs.rollout_log_probs[at],
            ref_log_probs=_at(inputs.ref_log_probs, at),
            advantages=inputs.advantages[at],
            mask=inputs.mask[at],
            sample_ids=micro_batch.sample_ids,
            num_samples=micro_batch.num_samples,
            weight_versions=inputs.weight_versions[at],
            version=inputs.version,
            teacher_log_probs=_at(inputs.teacher_log_probs, at),
            cov_selected=_at(inputs.cov_selected, at),
        )
        output = compose_loss(self.config, batch, self.loss_fn, self.off_policy_fn)
        weights = inputs.weights[at]
        parts = token_metrics(output.metrics, weights)
        if self.measure_gap:
            parts |= gap_parts(log_probs.detach(), batch.rollout_log_probs, batch.mask)
        bad = ~torch.isfinite(output.loss.detach())
        result = MicroBatchResult(micro_batch.index, micro_batch.rows, parts, bad, micro_batch.sample_ids)
        return (weights * output.loss).sum(), result


def _at(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]


def gap_parts(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far trainer and engine are apart on trained tokens, as scalars to be combined; all inputs `[T]`."""
    gap = torch.where(mask > 0, (log_probs - rollout_log_probs).abs(), 0.0).double()
    count = (mask > 0).sum().double()
    return {GAP_SUM: gap.sum(), GAP_COUNT: count, GAP_MAX: gap.max() if len(gap) else count}


def check_finite(results: list[MicroBatchResult], sample_ids: Tensor, where: str, dp_rank: int, device: Any) -> None:
    """Raise NonFiniteError on every rank when any of them has a loss that is not finite. Collective over the world."""
    problems = []
    for result in results:
        if bool(result.bad_tokens.any()):
            rows = result.sample_ids[result.bad_tokens].unique().tolist()
            samples = [int(sample_ids[result.rows[i]]) for i in rows]
            problems.append(f"micro-batch {result.index} of data-parallel worker {dp_rank}, samples {samples}")
    found = torch.tensor([len(problems)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if not int(found):
        return
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, problems)
    listed = sorted({problem for part in everywhere for problem in part})
    raise NonFiniteError(f"{where}: the loss is not finite in {'; '.join(listed)} (sample numbers of the step's batch)")


def check_grad_norm(norm: float, where: str) -> None:
    """Raise NonFiniteError when the gradient norm, the same on every rank, is not finite."""
    if not math.isfinite(norm):
        raise NonFiniteError(f"{where}: every loss is finite but the gradient norm is {norm}; nothing was updated")


def reduce_metrics(results: list[MicroBatchResult], layout: Layout, device: torch.device) -> dict[str, float]:
    """The numbers of one optimizer update, the same on every rank. Collective over the world."""
    finished: list[Any] = [None]
    if layout.is_last_stage:
        names = list(results[0].parts)
        stacked = {name: torch.stack([r.parts[name].to(device) for r in results]) for name in names}
        sums = torch.stack([x.sum() for x in stacked.values()])
        highest = torch.stack([x.max() for x in stacked.values()])
        if layout.dp.size > 1:
            dist.all_reduce(sums, group=layout.dp.group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=layout.dp.group)
        values = {
            name: high if is_maximum(name) or name == GAP_MAX else total
            for name, total, high in zip(names, sums.tolist(), highest.tolist(), strict=True)
        }
        finished = [_finish(values)]
    if layout.pp.size > 1:
        dist.broadcast_object_list(finished, src=layout.last_stage_rank, group=layout.pp.group)
    return finished[0]


def _finish(values: dict[str, float]) -> dict[str, float]:
    gap = {name: values.pop(name) for name in (GAP_SUM, GAP_COUNT, GAP_MAX) if name in values}
    metrics = finish_metrics(values)
    return metrics | (finish_gap(gap) if gap else {})


def finish_gap(gap: dict[str, float]) -> dict[str, float]:
    return {"logprob_diff_mean_abs": gap[GAP_SUM] / max(1.0, gap[GAP_COUNT]), GAP_MAX: gap[GAP_MAX]}
