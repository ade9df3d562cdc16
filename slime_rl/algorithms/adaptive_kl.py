"""The coefficient of the KL penalty that holds the KL to the reference near a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AdaptiveKL:
    """Proportional control of `--kl-coef`; Ziegler et al., arXiv 1909.08593, section 2.2.

    coef <- coef * (1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon)
    """

    coef: float
    target: float  # nats per token
    horizon: float  # episodes

    def update(self, kl: float, num_episodes: int) -> None:
        """Move the coefficient after a batch of episodes whose mean KL per token was `kl`."""
        error = min(0.2, max(-0.2, kl / self.target - 1))
        self.coef *= 1 + error * num_episodes / self.horizon
