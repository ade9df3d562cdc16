"""Losses that let every token have a gradient: soft or detached clipping, plain log-probs, a teacher.

rho_t = exp(log pi_theta - log pi_old). Every loss is per token `[T]`, 0 on masked tokens.
"""

from __future__ import annotations

import torch

from slime_rl.algorithms.batch import LossBatch, LossOutput
from slime_rl.algorithms.kl import clamp_log_ratio
from slime_rl.algorithms.policy_losses.clip import clip_bounds, clipped_surrogate
from slime_rl.config import Config


def cispo(config: Config, batch: LossBatch) -> LossOutput:
    """-sg(clip(rho, 1 - eps, 1 + eps_high)) A log pi_theta; CISPO of MiniMax-M1, arXiv 2506.13585.

    sg: no gradient. The weight is clipped, not the token's update, so rare tokens keep their gradient.
    """
    batch = batch.cleaned()
    low, high = clip_bounds(config.algorithm)
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -weight * batch.advantages * batch.log_probs
    return LossOutput(
        loss=torch.where(batch.mask > 0, loss, 0.0),
        metrics={"pg_clipfrac": (weight != ratio).to(loss.dtype), "ppo_kl": -log_ratio},
    )


def sapo(config: Config, batch: LossBatch) -> LossOutput:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_pos for A > 0 else tau_neg; SAPO, arXiv 2511.20347.

    The sigmoid is a soft clip: its slope is 1 at rho = 1 and fades on both sides.
    """
    batch = batch.cleaned()
    algorithm = config.algorithm
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs)
    positive = (batch.advantages > 0).to(batch.log_probs.dtype)
    tau = algorithm.sapo_tau_pos * positive + algorithm.sapo_tau_neg * (1 - positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    loss = torch.where(batch.mask > 0, -gate * batch.advantages, 0.0)
    return LossOutput(loss=loss, metrics={"ppo_kl": -log_ratio.detach()})


def gpg(config: Config, batch: LossBatch) -> LossOutput:
    """-A log pi_theta: the plain policy gradient, without ratio or clip; GPG, arXiv 2504.02546."""
    batch = batch.cleaned()
    loss = torch.where(batch.mask > 0, -batch.advantages * batch.log_probs, 0.0)
    return LossOutput(loss=loss, metrics={"ppo_kl": (batch.old_log_probs - batch.log_probs).detach()})


def sft(config: Config, batch: LossBatch) -> LossOutput:
    """-log pi_theta: supervised learning of the response; reads neither advantages nor old log-probs."""
    batch = batch.cleaned()
    loss = torch.where(batch.mask > 0, -batch.log_probs, 0.0)
    return LossOutput(loss=loss, metrics={"nll": loss.detach()})


def distillation(config: Config, batch: LossBatch) -> LossOutput:
    """PPO's clipped loss with A_t = log pi_teacher - log pi_old, the negative reverse KL of the token.

    On-policy distillation: Agarwal et al., arXiv 2306.13649; in this sampled form Lu et al., "On-Policy Distillation",
    Thinking Machines 2025. At pi_theta = pi_old its gradient is an unbiased estimate of the gradient of KL(pi_theta ||
    pi_teacher). `--distillation-reward-coef` adds the reward's advantages times that.

    Raises:
        ValueError: the batch has no `teacher_log_probs`.
    """
    batch = batch.cleaned()
    gap = batch.need("teacher_log_probs", "--policy-loss distillation") - batch.old_log_probs
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs)
    advantages = clamp_log_ratio(gap) + config.algorithm.distillation_reward_coef * batch.advantages
    loss, metrics = clipped_surrogate(config.algorithm, log_ratio.exp(), advantages, batch.mask)
    return LossOutput(loss=loss, metrics={**metrics, "ppo_kl": -log_ratio.detach(), "teacher_kl": -gap})
