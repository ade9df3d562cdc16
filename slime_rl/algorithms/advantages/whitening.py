"""The last step of every estimator: whitening where asked, zeros on masked tokens, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.config import Config

# Keeps the quotient finite when all advantages are nearly equal; small beside any real variance.
VARIANCE_EPS = 1e-8


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the unmasked tokens of the whole batch, unbiased variance; `[T]`.

    Equal values give exact zeros, and so does a single token.
    """
    keep = mask > 0
    chosen = x[keep].double()
    if len(chosen) == 0:
        return torch.zeros_like(x)
    chosen = chosen - chosen.min()  # as in Episodes.from_group_min: equal values become exact zeros
    variance = chosen.var() if len(chosen) > 1 else chosen.new_zeros(())
    whitened = (chosen - chosen.mean()) * torch.rsqrt(variance + VARIANCE_EPS)
    return torch.zeros_like(x).masked_scatter(keep, whitened.to(x.dtype))


def finish(config: Config, batch: AdvantageBatch, advantages: Tensor, *, always_whiten: bool = False) -> Tensor:
    """`[T]` float32 from `advantages [T]` float64: whitened with `--normalize-advantages`, 0 on masked tokens."""
    if always_whiten or config.algorithm.normalize_advantages:
        advantages = whiten(advantages, batch.mask)
    return torch.where(batch.mask > 0, advantages, 0.0).float()
