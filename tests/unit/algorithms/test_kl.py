"""KL estimators: formulas, bounds, and agreement with the exact KL."""

from __future__ import annotations

import math

import pytest
import torch

from slime_rl.algorithms.kl import KLType, kl_tokens

FORMULAS = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
    "k3_unbiased": lambda x: math.exp(-x) - 1 + x,
    "abs": abs,
}


@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_value_equals_formula(kind: KLType) -> None:
    gaps = [-3.0, -0.1, 0.0, 1e-6, 0.7, 5.0]
    got = kl_tokens(kind, torch.tensor(gaps, dtype=torch.float64), torch.zeros(len(gaps), dtype=torch.float64))
    assert got.tolist() == pytest.approx([FORMULAS[kind](x) for x in gaps], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_have_the_exact_kl_as_mean(kind: KLType) -> None:
    p, q = (torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(s)).double(), 0) for s in (0, 1))
    exact = float((p * (p / q).log()).sum())
    assert float((p * kl_tokens(kind, p.log(), q.log())).sum()) == pytest.approx(exact, rel=1e-9)


def test_unbiased_k3_has_the_gradient_of_the_exact_kl() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    q = torch.log_softmax(torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((p.exp().detach() * kl_tokens("k3_unbiased", p, q)).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_far_apart_policies_stay_finite() -> None:
    far = torch.tensor([-1e4, -float("inf")])
    for kind in FORMULAS:
        assert torch.isfinite(kl_tokens(kind, far, torch.zeros(2))).all()


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="got 'k4'"):
        kl_tokens("k4", torch.zeros(1), torch.zeros(1))  # pyright: ignore[reportArgumentType]
