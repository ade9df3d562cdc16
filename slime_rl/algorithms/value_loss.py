"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.batch import LossOutput
from slime_rl.config import Config


def value_loss(config: Config, *, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> LossOutput:
    """Clipped squared error of PPO (described in Huang et al., "The 37 Implementation Details of PPO", 2022).

        0.5 * max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2),   eps = --value-clip; 0 means no clipping

    Args:
        values: `[T]` of the critic being trained, with gradient.
        old_values: `[T]` before the update.
        returns: `[T]` from `gae_returns`.
        mask: `[T]`; masked tokens give 0, even where they are NaN.

    Returns:
        Loss `[T]`; metrics `value_loss`, `value_clipfrac`, `value_mean`.
    """
    keep = mask > 0
    values, old_values, returns = (torch.where(keep, x, 0.0) for x in (values, old_values, returns))
    error = (values - returns).square()
    clipped_error = error
    if config.algorithm.value_clip > 0:
        eps = config.algorithm.value_clip
        clipped = torch.minimum(torch.maximum(values, old_values - eps), old_values + eps)
        clipped_error = (clipped - returns).square()
    loss = 0.5 * torch.maximum(error, clipped_error)
    metrics = {
        "value_loss": loss.detach(),
        "value_clipfrac": (clipped_error > error).to(loss.dtype),
        "value_mean": values.detach(),
    }
    return LossOutput(loss=loss, metrics=metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var[R - V] / Var[R] over unmasked tokens of `[T]`; 0 where the returns do not vary."""
    keep = mask > 0
    returns, error = returns[keep].double(), (returns - values)[keep].double()
    variance = returns.var(correction=0) if len(returns) else returns.sum()
    return float(1 - error.var(correction=0) / variance) if variance > 0 else 0.0
