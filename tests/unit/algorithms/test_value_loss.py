"""The critic's loss against a loop, with its gradient."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from algorithm_batches import MASK, tokens

from slime_rl.algorithms.value_loss import explained_variance, value_loss
from slime_rl.config import Config

Make = Callable[..., Config]


def slow(eps: float, v: float, old: float, ret: float) -> float:
    if eps == 0:
        return 0.5 * (v - ret) ** 2
    clipped = min(max(v, old - eps), old + eps)
    return 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2)


@pytest.mark.parametrize("eps", [0.0, 0.2, 2.0])
def test_value_loss_and_gradient_equal_loop(algo: Make, eps: float) -> None:
    values, old, returns = tokens(1).requires_grad_(), tokens(2), tokens(3)
    output = value_loss(algo(value_clip=eps), values=values, old_values=old, returns=returns, mask=MASK)
    (gradient,) = torch.autograd.grad(output.loss.sum(), values)
    loss = output.loss.detach()
    for t, m in enumerate(MASK.tolist()):
        if not m:
            assert (float(loss[t]), float(gradient[t])) == (0.0, 0.0)
            continue
        v, o, r = (float(x[t].detach()) for x in (values, old, returns))
        assert float(loss[t]) == pytest.approx(slow(eps, v, o, r), rel=1e-12)
        slope = (slow(eps, v + 1e-6, o, r) - slow(eps, v - 1e-6, o, r)) / 2e-6
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert (float(output.metrics["value_clipfrac"].sum()) > 0) == (eps > 0)


def test_explained_variance_equals_definition() -> None:
    values, returns = tokens(1), tokens(2)
    pairs = [(float(v), float(r)) for v, r, m in zip(values, returns, MASK, strict=True) if m]
    want = 1 - statistics.pvariance([r - v for v, r in pairs]) / statistics.pvariance([r for _, r in pairs])
    assert explained_variance(values, returns, MASK) == pytest.approx(want)
    assert explained_variance(returns, returns, MASK) == pytest.approx(1.0)
    assert explained_variance(values, torch.ones_like(returns), MASK) == 0.0
    assert explained_variance(values, returns, MASK * 0) == 0.0
