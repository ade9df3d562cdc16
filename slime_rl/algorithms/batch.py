"""What algorithms see: flat token tensors with the sample each token belongs to. No padding, no process groups.

Shape letters: N samples, T response tokens of those samples one after the other (prompt tokens are not there).
`sample_ids [T]` says which of the N samples a token belongs to, so a per-sample quantity x `[N]` becomes per-token as
`x[sample_ids]`, and a per-token one becomes per-sample with `segment_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """The whole global batch of one step, on every rank alike, so that no estimator needs a collective."""

    rewards: Tensor  # [N] float32, one per sample
    group_ids: Tensor  # [N] int64, 0..num_groups-1 in order of appearance
    rollout_ids: Tensor  # [N] int64; samples of one episode share it
    lengths: Tensor  # [N] int64, response tokens of each sample
    mask: Tensor  # [T] float32, 1 = trained on
    old_log_probs: Tensor | None  # [T] float32, trainer's before the update
    rollout_log_probs: Tensor  # [T] float32, engine's
    ref_log_probs: Tensor | None  # [T] float32, reference model's
    values: Tensor | None  # [T] float32, critic's
    baseline_rewards: Tensor | None = None  # [N] float32, greedy response to the same prompt; only remax reads it

    def copy(self) -> AdvantageBatch:
        """The same numbers in tensors of their own."""
        return replace(self, **{k: v.clone() for k, v in vars(self).items() if isinstance(v, Tensor)})

    @property
    def sample_ids(self) -> Tensor:  # [T] int64
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """One micro-batch with whole sequences. Only `log_probs` and `entropy` carry gradients.

    The fields with a default are read by the losses named beside them; a loss whose field is missing raises ValueError.
    """

    log_probs: Tensor  # [T] float32, of the policy being trained
    entropy: Tensor  # [T] float32; detached when --entropy-coef is 0
    old_log_probs: Tensor  # [T] float32
    rollout_log_probs: Tensor  # [T] float32
    ref_log_probs: Tensor | None  # [T] float32
    advantages: Tensor  # [T] float32
    mask: Tensor  # [T] float32
    sample_ids: Tensor  # [T] int64, 0..N-1
    num_samples: int
    weight_versions: Tensor | None = None  # [T] int64, version that sampled the token; decoupled_ppo with interpolate
    version: int | None = None  # version of the weights at the start of this step; the same
    teacher_log_probs: Tensor | None = None  # [T] float32; distillation
    cov_selected: Tensor | None = None  # [T] bool from `select_by_covariance` on the whole update; clip_cov, kl_cov

    def with_mask(self, mask: Tensor) -> LossBatch:
        return replace(self, mask=mask)

    def copy(self) -> LossBatch:
        """The same numbers in tensors of their own; gradients flow through."""
        return replace(self, **{k: v.clone() for k, v in vars(self).items() if isinstance(v, Tensor)})

    def cleaned(self) -> LossBatch:
        """The batch with every masked entry 0, so that NaN there reaches neither the loss nor a gradient."""
        keep = self.mask > 0
        floats = {k: v for k, v in vars(self).items() if isinstance(v, Tensor) and v.is_floating_point()}
        return replace(self, **{k: torch.where(keep, v, 0.0) for k, v in floats.items()})

    def need(self, name: str, user: str) -> Any:
        """An optional field. Raises ValueError, naming the flag value that asked (`user`), where it is missing."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{user} needs {name}, but the batch has none")
        return value


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Loss per token and what to report: each metric is a `[T]` tensor averaged with the loss's own token weights.

    Metrics whose name ends in `_max` are reduced by their maximum instead; see `metrics.py`.
    """

    loss: Tensor  # [T] float32
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OffPolicyOutput:
    """What an off-policy correction says; weights and mask stay apart, so rejecting a token edits only the mask."""

    weights: Tensor  # [T] float32, no gradient; multiplies the policy loss
    mask: Tensor  # [T] float32, at most the batch's mask
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [T] each, as in LossOutput


def segment_sum(x: Tensor, ids: Tensor, num: int) -> Tensor:
    """Sum of `x [T]` over the tokens of each of `num` samples -> `[num]`, differentiable."""
    return torch.zeros(num, dtype=x.dtype, device=x.device).index_add(0, ids, x)


def segment_mean(x: Tensor, mask: Tensor, ids: Tensor, num: int) -> Tensor:
    """Mean of `x [T]` over the unmasked tokens of each sample -> `[num]`; 0 where a sample has none."""
    return segment_sum(x * mask, ids, num) / segment_sum(mask, ids, num).clamp(min=1)
