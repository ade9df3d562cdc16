"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens.

With l = log p - log q of a token that p sampled (John Schulman, "Approximating KL Divergence", 2020):

    k1 = l                  unbiased, high variance, may be negative
    k2 = l^2 / 2            biased, its gradient is that of the KL
    k3 = exp(-l) - 1 + l    unbiased, low variance, never negative; its gradient is not that of the KL
    k3_unbiased             k3's value, k2's gradient
    abs = |l|
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3", "k3_unbiased", "abs"]

# exp(20) = 4.9e8 is far beyond any ratio that carries information; without the bound one token can overflow the loss.
LOG_RATIO_BOUND = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` of any shape within [-20, 20]; no gradient outside."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_tokens(kind: KLType, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL estimate of each token, all `[T]`; `log_probs` is the sampling policy and may carry a gradient."""
    log_ratio = clamp_log_ratio(log_probs - ref_log_probs)
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    k2 = log_ratio.square() / 2
    if kind == "k2":
        return k2
    k3 = torch.expm1(-log_ratio) + log_ratio
    if kind == "k3":
        return k3
    if kind == "k3_unbiased":
        return k2 - k2.detach() + k3.detach()
    raise ValueError(f"KL estimator must be k1, k2, k3, k3_unbiased or abs, got {kind!r}")
