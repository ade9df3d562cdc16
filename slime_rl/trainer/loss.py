"""The loss of one micro-batch, and from the micro-batches' results to the numbers that are reported."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch, LossOutput
from slime_rl.algorithms.compose import compose_loss
from slime_rl.algorithms.metrics import finish_metrics, is_maximum, token_metrics
from slime_rl.algorithms.registry import OFF_POLICY, POLICY_LOSSES
from slime_rl.algorithms.value_loss import value_loss
from slime_rl.config import Config
from slime_rl.protocols import OffPolicyFunction, PolicyLossFunction
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.forward import LossFn
from slime_rl.trainer.packing import MicroBatch

GAP_SUM, GAP_COUNT, GAP_MAX = "logprob_diff_sum", "logprob_diff_count", "logprob_diff_max_abs"
NEEDS_OLD_BEFORE = ("clip_cov", "kl_cov")  # choose tokens of the whole update by their old log-probs


class NonFiniteError(ValueError):
    """A loss or gradient is NaN or infinite; nothing was updated."""


def needs_old_pass(config: Config) -> bool:
    """Whether old log-probs take a forward pass of their own before the update."""
    algorithm, train = config.algorithm, config.train
    if train.loss == "sft" or algorithm.old_log_probs == "rollout":
        return False
    one_update = train.num_updates_per_rollout * train.num_epochs_per_rollout == 1
    needed_before = algorithm.kl_coef > 0 or algorithm.policy_loss in NEEDS_OLD_BEFORE
    return algorithm.old_log_probs == "recompute" or not one_update or needed_before


@dataclass(frozen=True)
class MicroBatchResult:
    """What one micro-batch leaves behind on the last pipeline stage."""

    index: int
    rows: list[int]
    loss: Tensor  # scalar, its part of the update's loss
    parts: dict[str, Tensor]  # scalars, to be summed (or maximised) over micro-batches and workers
    bad_tokens: dict[str, Tensor]  # [T] bool each: where the loss, or a number of a trained token, is not finite
    sample_ids: Tensor  # [T] int64, 0..n-1


@dataclass(frozen=True)
class PolicyInputs:
    """Per response token of this worker `[t]`, beside what the forward pass gives."""

    role: ClassVar[str] = "policy"

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

    def loss_fn(self, config: Config, first: bool) -> LossFn:
        is_sft = config.train.loss == "sft"
        return PolicyMicroBatchLoss(
            config,
            self,
            POLICY_LOSSES.load("sft" if is_sft else config.algorithm.policy_loss),
            None if is_sft else OFF_POLICY.load(config.algorithm.off_policy_correction),
            measure_gap=first and not is_sft and not needs_old_pass(config),
        )


class PolicyMicroBatchLoss:
    """Callable for `forward.run`: the weighted loss of one micro-batch, summed."""

    def __init__(
        self,
        config: Config,
        inputs: PolicyInputs,
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
        loss, result = weighted(micro_batch, output, inputs.weights[at], batch.mask, _engine_and_model(batch))
        if self.measure_gap:
            result.parts.update(gap_parts(log_probs.detach(), batch.rollout_log_probs, batch.mask))
        return loss, result


@dataclass(frozen=True)
class CriticInputs:
    """Per response token of this worker `[t]` float32, beside the values of the forward pass."""

    role: ClassVar[str] = "critic"

    mask: Tensor
    weights: Tensor  # from token_weights on the whole update, as the policy's
    old_values: Tensor  # before the step
    returns: Tensor  # what the values should be

    def loss_fn(self, config: Config, first: bool) -> LossFn:
        def loss(micro_batch: MicroBatch, values: Tensor) -> tuple[Tensor, MicroBatchResult]:
            at = micro_batch.token_index
            output = value_loss(
                config, values=values, old_values=self.old_values[at], returns=self.returns[at], mask=self.mask[at]
            )
            given = {"values": self.old_values[at], "returns": self.returns[at]}
            return weighted(micro_batch, output, self.weights[at], self.mask[at], given)

        return loss


Objective = PolicyInputs | CriticInputs  # what an update minimises


def weighted(
    micro_batch: MicroBatch, output: LossOutput, weights: Tensor, mask: Tensor, given: dict[str, Tensor]
) -> tuple[Tensor, MicroBatchResult]:
    """The scalar to differentiate, and the micro-batch's part of every metric.

    Args:
        weights, mask: `[T]` float32.
        given: `[T]` float32 each, what the loss was made from. A clip or a mask may hide that one is not finite.
    """
    loss = (weights * output.loss).sum()
    bad = {"the loss": ~torch.isfinite(output.loss.detach())}
    bad |= {name: ~torch.isfinite(numbers) & (mask > 0) for name, numbers in given.items()}
    return loss, MicroBatchResult(
        index=micro_batch.index,
        rows=micro_batch.rows,
        loss=loss.detach(),
        parts=token_metrics(output.metrics, weights),
        bad_tokens=bad,
        sample_ids=micro_batch.sample_ids,
    )


def _engine_and_model(batch: LossBatch) -> dict[str, Tensor]:
    named = {
        "advantages": batch.advantages,
        "rollout_log_probs": batch.rollout_log_probs,
        "old_log_probs": batch.old_log_probs,
        "ref_log_probs": batch.ref_log_probs,
        "teacher_log_probs": batch.teacher_log_probs,
    }
    return {name: numbers for name, numbers in named.items() if numbers is not None}


def _at(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]


def gap_parts(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far trainer and engine are apart on trained tokens, as scalars to be combined; all inputs `[T]`."""
    gap = torch.where(mask > 0, (log_probs - rollout_log_probs).abs(), 0.0).double()
    count = (mask > 0).sum().double()
    return {GAP_SUM: gap.sum(), GAP_COUNT: count, GAP_MAX: gap.max() if len(gap) else count}


def find_problem(
    results: list[MicroBatchResult], norm: float, sample_ids: Tensor, dp_rank: int, device: torch.device
) -> str | None:
    """What is not finite in an update, the same text on every rank; None when all is well. Collective over the world.

    Args:
        norm: gradient norm, the same on every rank.
        sample_ids: `[n]` of this worker's rows.
    """
    problems = []
    for result in results:
        where = f"micro-batch {result.index} of data-parallel worker {dp_rank}"
        for name, bad in result.bad_tokens.items():
            if bool(bad.any()):
                rows = result.sample_ids[bad].unique().tolist()
                problems.append(f"{name} in {where}, samples {[int(sample_ids[result.rows[i]]) for i in rows]}")
    found = torch.tensor([len(problems)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if not int(found):
        return None if math.isfinite(norm) else f"every loss is finite but the gradient norm is {norm}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, problems)
    listed = sorted({problem for part in everywhere for problem in part})
    return f"not finite: {'; '.join(listed)} (sample numbers of the step's batch)"


def is_largest(name: str) -> bool:
    """Whether the parts of this metric are combined by their maximum."""
    return is_maximum(name) or name == GAP_MAX


def reduce_metrics(results: list[MicroBatchResult], layout: Layout, device: torch.device) -> dict[str, float]:
    """The numbers of one optimizer update, the same on every rank. Collective over the world.

    Raises:
        ValueError: micro-batches that have other metrics than others, which only a loss of one's own can make.
    """
    finished: list[Any] = [None]
    if layout.is_last_stage:
        names = list(results[0].parts)
        _check_names(results, layout, device)
        stacked = {name: torch.stack([r.parts[name].to(device) for r in results]) for name in names}
        sums = torch.stack([x.sum() for x in stacked.values()])
        highest = torch.stack([x.max() for x in stacked.values()])
        if layout.dp.size > 1:
            dist.all_reduce(sums, group=layout.dp.group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=layout.dp.group)
        values = {
            name: high if is_largest(name) else total
            for name, total, high in zip(names, sums.tolist(), highest.tolist(), strict=True)
        }
        finished = [_finish(values)]
    if layout.pp.size > 1:
        dist.broadcast_object_list(finished, src=layout.last_stage_rank, group=layout.pp.group)
    return finished[0]


def _check_names(results: list[MicroBatchResult], layout: Layout, device: torch.device) -> None:
    names = sorted(results[0].parts)
    odd = next((r for r in results if sorted(r.parts) != names), None)
    number = -1 if odd is not None else zlib.crc32("\0".join(names).encode())
    bounds = torch.tensor([number, -number], device=device)
    if layout.dp.size > 1:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=layout.dp.group)
    if odd is not None or int(bounds[0]) != -int(bounds[1]):
        found = f"micro-batch {results[0].index}: {names}; " + (
            "another data-parallel worker has others"
            if odd is None
            else f"micro-batch {odd.index}: {sorted(odd.parts)}"
        )
        raise ValueError(
            "--policy-loss, --off-policy-correction: the metrics must have the same names for every micro-batch, got "
            f"{found}"
        )


def _finish(values: dict[str, float]) -> dict[str, float]:
    gap = {name: values.pop(name) for name in (GAP_SUM, GAP_COUNT, GAP_MAX) if name in values}
    metrics = finish_metrics(values)
    return metrics | (finish_gap(gap) if gap else {})


def finish_gap(gap: dict[str, float]) -> dict[str, float]:
    return {"logprob_diff_mean_abs": gap[GAP_SUM] / max(1.0, gap[GAP_COUNT]), GAP_MAX: gap[GAP_MAX]}
