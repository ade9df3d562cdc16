"""Every policy loss against a loop: value, and gradient by finite differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import slow_losses
import torch
from algorithm_batches import IDS, MASK, Token, loss_batch, unmasked

from slime_rl.algorithms.batch import LossBatch
from slime_rl.algorithms.policy_losses.clip import proximal_log_probs
from slime_rl.algorithms.registry import POLICY_LOSSES
from slime_rl.config import AlgorithmConfig, Config

Make = Callable[..., Config]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {}),
    ("ppo_clip", {"eps_clip": 0.1, "eps_clip_high": 0.3}),
    ("ppo_clip", {"eps_clip": 0.1, "eps_clip_c": 1.2}),
    ("gspo", {"eps_clip": 0.02, "eps_clip_high": 0.05}),
    ("geo_mean", {"eps_clip": 0.2, "eps_clip_high": 0.4}),
    ("cispo", {"eps_clip": 0.1, "eps_clip_high": 0.3}),
    ("sapo", {}),
    ("sapo", {"sapo_tau_pos": 2.0, "sapo_tau_neg": 0.5}),
    ("gpg", {}),
    ("sft", {}),
    ("distillation", {}),
    ("distillation", {"distillation_reward_coef": 0.7, "eps_clip": 0.1}),
    ("clip_cov", {}),
    ("kl_cov", {"kl_cov_coef": 0.5}),
    ("decoupled_ppo", {}),
    ("decoupled_ppo", {"behave_weight_cap": 1.1}),
    ("decoupled_ppo", {"proximal_policy": "interpolate", "behave_weight_cap": 1.1}),
]


def run(config: Config, name: str, batch: LossBatch) -> torch.Tensor:
    return POLICY_LOSSES.load(name)(config, batch).loss


def test_every_registered_loss_is_covered() -> None:
    assert {name for name, _ in CASES} == set(POLICY_LOSSES.builtins)


@pytest.mark.parametrize(("name", "fields"), CASES)
@pytest.mark.parametrize("gap", [0.01, 0.3, 1.5])
def test_loss_equals_loop(algo: Make, name: str, fields: dict[str, Any], gap: float) -> None:
    config, batch = algo(**fields), loss_batch(gap=gap)
    rows = unmasked(batch)
    want = [0.0] * len(IDS)
    for row, value in zip(rows, getattr(slow_losses, name)(config.algorithm, rows, rows), strict=True):
        want[row.index] = value
    assert run(config, name, batch).tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)


def finite_differences(slow: slow_losses.Slow, a: AlgorithmConfig, rows: list[Token], weights: list[float]) -> dict:
    """Central differences of sum of weight * loss with respect to each token's log-prob."""
    step, out = 1e-6, {}
    for i, row in enumerate(rows):
        ends = []
        for sign in (1, -1):
            moved = [*rows[:i], dataclasses.replace(row, theta=row.theta + sign * step), *rows[i + 1 :]]
            ends.append(sum(w * v for w, v in zip(weights, slow(a, moved, rows), strict=True)))
        out[row.index] = (ends[0] - ends[1]) / (2 * step)
    return out


@pytest.mark.parametrize(("name", "fields"), CASES)
@pytest.mark.parametrize("gap", [0.05, 0.4])
def test_gradient_equals_finite_differences(algo: Make, name: str, fields: dict[str, Any], gap: float) -> None:
    config, batch = algo(**fields), loss_batch(20, gap=gap)
    log_probs = batch.log_probs.clone().requires_grad_()
    weights = torch.rand(len(IDS), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loss = run(config, name, dataclasses.replace(batch, log_probs=log_probs))
    (gradient,) = torch.autograd.grad((loss * weights).sum(), log_probs)
    rows = unmasked(batch)
    slow = finite_differences(
        getattr(slow_losses, name), config.algorithm, rows, [float(weights[r.index]) for r in rows]
    )
    want = [slow.get(i, 0.0) for i in range(len(IDS))]  # a masked token is NaN in the batch and must have gradient 0
    assert gradient.tolist() == pytest.approx(want, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_masked_nans_reach_neither_loss_nor_metrics_of_unmasked(algo: Make, name: str, fields: dict[str, Any]) -> None:
    output = POLICY_LOSSES.load(name)(algo(**fields), loss_batch())
    assert torch.equal(output.loss[MASK == 0], torch.zeros(int((MASK == 0).sum()), dtype=torch.float64))
    for values in output.metrics.values():
        assert values.shape == output.loss.shape
        assert not values.requires_grad
        assert torch.isfinite(values[MASK > 0]).all()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "sapo", "geo_mean", "kl_cov", "decoupled_ppo"])
def test_huge_log_ratio_stays_finite(algo: Make, name: str) -> None:
    batch = loss_batch()
    far = dataclasses.replace(
        batch, log_probs=torch.zeros_like(batch.log_probs), old_log_probs=batch.log_probs * 0 - 500
    )
    assert torch.isfinite(run(algo(), name, far)).all()


def test_ppo_metrics_count_what_was_clipped(algo: Make) -> None:
    one = torch.ones(4, dtype=torch.float64)
    batch = loss_batch(
        old_log_probs=one * 0,
        rollout_log_probs=one * 0,
        entropy=one * 0,
        ref_log_probs=None,
        teacher_log_probs=None,
        log_probs=torch.tensor([0.5, 0.5, -0.5, 2.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        mask=one,
        sample_ids=torch.zeros(4, dtype=torch.int64),
        num_samples=1,
    )
    metrics = POLICY_LOSSES.load("ppo_clip")(algo(eps_clip_c=3.0), batch).metrics
    assert metrics["pg_clipfrac"].tolist() == [1, 0, 1, 0]
    assert metrics["pg_clipfrac_lower"].tolist() == [0, 0, 0, 1]
    assert metrics["ppo_kl"].tolist() == [-0.5, -0.5, 0.5, -2.0]


def test_interpolated_proximal_keeps_the_engines_log_prob_for_current_tokens(algo: Make) -> None:
    batch = loss_batch().cleaned()
    proximal = proximal_log_probs(algo(proximal_policy="interpolate"), batch)
    assert batch.weight_versions is not None
    current = batch.weight_versions == 7
    assert torch.equal(proximal[current], batch.rollout_log_probs[current])
    one_old = batch.weight_versions == 6
    halfway = (batch.rollout_log_probs + batch.log_probs)[one_old] / 2
    torch.testing.assert_close(proximal[one_old], halfway)


@pytest.mark.parametrize(
    ("name", "fields", "missing"),
    [
        ("distillation", {}, "teacher_log_probs"),
        ("clip_cov", {}, "cov_selected"),
        ("kl_cov", {}, "cov_selected"),
        ("decoupled_ppo", {"proximal_policy": "interpolate"}, "weight_versions"),
        ("decoupled_ppo", {"proximal_policy": "interpolate"}, "version"),
    ],
)
def test_missing_field_is_named(algo: Make, name: str, fields: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs {missing}, but the batch has none"):
        run(algo(**fields), name, loss_batch(**{missing: None}))
