"""Losses that clip the probability ratio of each token.

rho_t = exp(log pi_theta - log pi_old), clamped to exp(+-20). Every loss is per token `[T]`, 0 on masked tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch, LossOutput
from slime_rl.algorithms.kl import clamp_log_ratio
from slime_rl.config import Config
from slime_rl.config.algorithm import AlgorithmConfig


def clip_bounds(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """(lower, upper) distance of the clip range; the upper one is the lower one unless given (DAPO's clip-higher)."""
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    return algorithm.eps_clip, high


def ppo_clip(config: Config, batch: LossBatch) -> LossOutput:
    """-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A); PPO, arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476.

    With `--eps-clip-c` c the loss of a token with A < 0 is at most -c A (dual clip, arXiv 1912.09729).
    """
    batch = batch.cleaned()
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs)
    loss, metrics = clipped_surrogate(config.algorithm, log_ratio.exp(), batch.advantages, batch.mask)
    return LossOutput(loss=loss, metrics={**metrics, "ppo_kl": -log_ratio.detach()})


def clipped_surrogate(
    algorithm: AlgorithmConfig, ratio: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's pessimistic bound `[T]` for a `ratio [T]`, with `pg_clipfrac` and `pg_clipfrac_lower` (the dual clip)."""
    low, high = clip_bounds(algorithm)
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(plain, clipped)
    is_clipped, is_bounded = clipped > plain, torch.zeros_like(mask, dtype=torch.bool)
    if algorithm.eps_clip_c is not None:
        bound = -algorithm.eps_clip_c * advantages
        is_bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
    loss = torch.where(mask > 0, loss, 0.0)
    return loss, {"pg_clipfrac": is_clipped.to(loss.dtype), "pg_clipfrac_lower": is_bounded.to(loss.dtype)}


def decoupled_ppo(config: Config, batch: LossBatch) -> LossOutput:
    """-w min(u A, clip(u, 1 - eps, 1 + eps_high) A), u = pi_theta / pi_prox, w = pi_prox / pi_behave, no gradient in w.

    Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298. pi_behave is the engine's probability, whatever version
    sampled the token. `--proximal-policy` chooses pi_prox (see `proximal_log_probs`), `--behave-weight-cap` bounds w.
    """
    batch = batch.cleaned()
    algorithm = config.algorithm
    proximal = proximal_log_probs(config, batch)
    log_ratio = clamp_log_ratio(batch.log_probs - proximal)
    loss, metrics = clipped_surrogate(algorithm, log_ratio.exp(), batch.advantages, batch.mask)
    weight = clamp_log_ratio(proximal - batch.rollout_log_probs).exp()
    if algorithm.behave_weight_cap is not None:
        weight = weight.clamp(max=algorithm.behave_weight_cap)
    return LossOutput(
        loss=torch.where(batch.mask > 0, weight * loss, 0.0),
        metrics={**metrics, "ppo_kl": -log_ratio.detach(), "behave_weight": weight},
    )


def proximal_log_probs(config: Config, batch: LossBatch) -> Tensor:
    """log pi_prox `[T]`, no gradient.

    recompute: the trainer's log-probs before the update. interpolate, for a token that version b sampled, in the step
    that turns version v into v + 1:

        log pi_prox = log pi_behave + alpha (log pi_theta - log pi_behave),   alpha = (v - b) / (v + 1 - b)

    so a token of the current version keeps the engine's log-prob and an older one moves towards the current policy.

    Raises:
        ValueError: interpolate without `weight_versions` or `version`.
    """
    if config.algorithm.proximal_policy == "recompute":
        return batch.old_log_probs.detach()
    user = "--proximal-policy interpolate"
    age = (batch.need("version", user) - batch.need("weight_versions", user)).clamp(min=0).to(batch.log_probs.dtype)
    alpha = age / (age + 1)
    return batch.rollout_log_probs + alpha * (batch.log_probs.detach() - batch.rollout_log_probs)
