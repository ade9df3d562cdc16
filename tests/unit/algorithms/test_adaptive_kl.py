from __future__ import annotations

import pytest

from slime_rl.algorithms.adaptive_kl import AdaptiveKL


def test_coefficient_moves_towards_the_target_and_by_at_most_a_fifth_of_the_batch_over_the_horizon() -> None:
    control = AdaptiveKL(coef=0.1, target=2.0, horizon=1000)
    control.update(kl=2.2, num_episodes=100)  # 10 % too much
    assert control.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    control = AdaptiveKL(coef=0.1, target=2.0, horizon=1000)
    control.update(kl=50.0, num_episodes=100)
    assert control.coef == pytest.approx(0.1 * 1.02)
    control.update(kl=-50.0, num_episodes=100)
    assert control.coef == pytest.approx(0.1 * 1.02 * 0.98)
    control.update(kl=2.0, num_episodes=100)
    assert control.coef == pytest.approx(0.1 * 1.02 * 0.98)
