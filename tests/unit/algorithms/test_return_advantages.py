"""Return-based estimators against backward loops over each sample's trainable tokens in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from algorithm_batches import IDS, MASK, MASKS, advantage_batch

from slime_rl.algorithms.advantages import returns
from slime_rl.algorithms.advantages.whitening import whiten
from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.config import Config

Make = Callable[..., Config]


def trainable(sample: int) -> list[int]:
    """Flat positions of a sample's trainable tokens."""
    return [t for t, i in enumerate(IDS) if i == sample and MASK[t] > 0]


def slow_rewards(batch: AdvantageBatch, kl_coef: float) -> list[float]:
    out = [0.0] * len(IDS)
    assert batch.old_log_probs is not None and batch.ref_log_probs is not None
    for sample in range(len(MASKS)):
        positions = trainable(sample)
        for t in positions:
            out[t] -= kl_coef * (float(batch.old_log_probs[t].double()) - float(batch.ref_log_probs[t].double()))
        if positions:
            out[positions[-1]] += float(batch.rewards[sample])
    return out


def slow_returns(batch: AdvantageBatch, gamma: float, kl_coef: float = 0.0) -> list[float]:
    rewards, out = slow_rewards(batch, kl_coef), [0.0] * len(IDS)
    for sample in range(len(MASKS)):
        after = 0.0
        for t in reversed(trainable(sample)):
            after = out[t] = rewards[t] + gamma * after
    return out


def slow_gae(batch: AdvantageBatch, gamma: float, lambd: float, kl_coef: float) -> tuple[list[float], list[float]]:
    assert batch.values is not None
    rewards, values = slow_rewards(batch, kl_coef), batch.values.double().tolist()
    advantages, targets = [0.0] * len(IDS), [0.0] * len(IDS)
    for sample in range(len(MASKS)):
        next_value = next_advantage = 0.0
        for t in reversed(trainable(sample)):
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = advantages[t] = delta + gamma * lambd * next_advantage
            next_value = values[t]
            targets[t] = advantages[t] + values[t]
    return advantages, targets


def slow_whiten(x: list[float]) -> list[float]:
    chosen = [v for v, m in zip(x, MASK.tolist(), strict=True) if m]
    mean, std = statistics.fmean(chosen), math.sqrt(statistics.variance(chosen) + 1e-8)
    return [(v - mean) / std if m else 0.0 for v, m in zip(x, MASK.tolist(), strict=True)]


def close(actual: torch.Tensor, want: list[float]) -> None:
    assert actual.dtype == torch.float32
    assert actual.tolist() == pytest.approx(want, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize(("gamma", "kl_coef"), [(1.0, 0.0), (0.9, 0.0), (0.95, 0.1), (0.0, 0.0)])
def test_reinforce_family_equals_backward_loop(algo: Make, gamma: float, kl_coef: float) -> None:
    batch = advantage_batch()
    config, want = algo(gamma=gamma, kl_coef=kl_coef), slow_returns(batch, gamma, kl_coef)
    close(returns.reinforce(config, batch), want)
    close(returns.reinforce(algo(gamma=gamma, kl_coef=kl_coef, normalize_advantages=True), batch), slow_whiten(want))
    close(returns.reinforce_plus_plus(config, batch), slow_whiten(want))
    assert batch.baseline_rewards is not None
    greedy = [float(batch.baseline_rewards[i]) for i in IDS]
    close(returns.remax(config, batch), [(r - g) * float(m) for r, g, m in zip(want, greedy, MASK, strict=True)])


@pytest.mark.parametrize(("gamma", "lambd", "kl_coef"), [(1.0, 1.0, 0.0), (0.99, 0.95, 0.0), (0.9, 0.0, 0.1)])
def test_gae_equals_backward_loop(algo: Make, gamma: float, lambd: float, kl_coef: float) -> None:
    batch = advantage_batch()
    config = algo(gamma=gamma, lambd=lambd, kl_coef=kl_coef)
    advantages, targets = slow_gae(batch, gamma, lambd, kl_coef)
    close(returns.gae(config, batch), advantages)
    close(returns.gae_returns(config, batch), targets)
    whitened = algo(gamma=gamma, lambd=lambd, kl_coef=kl_coef, normalize_advantages=True)
    close(returns.gae(whitened, batch), slow_whiten(advantages))
    close(returns.gae_returns(whitened, batch), targets)  # the critic's target is not whitened
    assert any(advantages) and any(targets)


def test_reward_of_a_response_that_ends_in_tool_text_is_not_lost(algo: Make) -> None:
    batch = advantage_batch()
    position = trainable(2)[-1]
    assert MASK[position + 1] == 0
    assert float(returns.reinforce(algo(gamma=0.5), batch)[position]) == 0.25


def test_fully_masked_batch_gives_zeros(algo: Make) -> None:
    batch = advantage_batch(mask=torch.zeros(len(IDS)))
    for name in ("reinforce", "reinforce_plus_plus", "remax", "gae", "gae_returns"):
        assert torch.equal(getattr(returns, name)(algo(kl_coef=0.1), batch), torch.zeros(len(IDS)))


def test_missing_inputs_are_named(algo: Make) -> None:
    with pytest.raises(ValueError, match="remax needs baseline_rewards"):
        returns.remax(algo(), advantage_batch(baseline_rewards=None))
    with pytest.raises(ValueError, match="gae needs values"):
        returns.gae(algo(), advantage_batch(values=None))


def test_discounted_sum_equals_loop_on_long_runs() -> None:
    x = torch.randn(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate((1, 1037, 2, 1960))])
    want, after = [0.0] * 3000, 0.0
    for t in reversed(range(3000)):
        after = want[t] = float(x[t]) + (0.999 * after if t + 1 < 3000 and ids[t] == ids[t + 1] else 0.0)
    assert returns.discounted_sum(x, ids, 0.999).tolist() == pytest.approx(want, rel=1e-10, abs=1e-10)


def test_whitening_equal_values_gives_exact_zeros() -> None:
    x = torch.full((7,), 0.1)
    assert torch.equal(whiten(x, torch.ones(7)), torch.zeros(7))
    assert torch.equal(whiten(x, torch.zeros(7)), torch.zeros(7))
    assert torch.equal(whiten(torch.tensor([3.0, torch.nan]), torch.tensor([1.0, 0.0])), torch.zeros(2))
