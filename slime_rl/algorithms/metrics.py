"""From metrics per token to one number per update, over micro-batches and workers.

per micro-batch: token_metrics ──► sum (or max for *_max) over micro-batches and ranks ──► finish_metrics
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WEIGHT_SUM = "weight_sum"
MAX_SUFFIX = "_max"
# Parts of the loss keep the loss's own scale; every other metric is an average over tokens.
LOSS_PARTS = frozenset({"loss", "pg_loss", "kl_loss", "entropy_loss", "value_loss"})

# What a loss of one's own must not call a metric, since a number of ours has that name.
RESERVED = LOSS_PARTS | {WEIGHT_SUM, "entropy", "grad_norm", "lr", "num_microbatches", "tokens", "trained_tokens"}


def is_maximum(name: str) -> bool:
    """Whether partial results of this metric are combined by max rather than by sum."""
    return name.endswith(MAX_SUFFIX)


def token_metrics(metrics: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """This micro-batch's part of every metric `[T]` as a scalar float64, with the sum of weights as `weight_sum`.

    Args:
        metrics: `[T]` each.
        weights: `[T]` from `token_weights`; tokens of weight 0 count for nothing.
    """
    weights = weights.double()
    used = weights > 0
    parts = {WEIGHT_SUM: weights.sum()}
    for name, values in metrics.items():
        values = values.detach().double()
        if is_maximum(name):
            parts[name] = values.masked_fill(~used, -torch.inf).max() if len(values) else weights.new_tensor(-torch.inf)
        else:
            parts[name] = (torch.where(used, values, 0.0) * weights).sum()
    return parts


def finish_metrics(parts: dict[str, float]) -> dict[str, float]:
    """The reported numbers from the combined parts; adds `off_policy/ess`, the effective share of samples in (0, 1].

    ess = E[rho]^2 / E[rho^2], from `off_policy/ratio` and `off_policy/chi2` = E[rho^2] - 1.
    """
    total = parts[WEIGHT_SUM]
    finished = {}
    for name, value in parts.items():
        if name == WEIGHT_SUM:
            continue
        if is_maximum(name):
            finished[name] = 0.0 if value == -math.inf else value  # no token at all
        else:
            finished[name] = value if name in LOSS_PARTS else value / total if total > 0 else 0.0
    if "off_policy/ratio" in finished and total > 0:
        finished["off_policy/ess"] = finished["off_policy/ratio"] ** 2 / (finished["off_policy/chi2"] + 1)
    return finished
