"""Losses whose ratio belongs to the whole response.

Means run over a sample's unmasked tokens. They are the same however samples are packed, because a micro-batch holds
whole samples. With seq-mean-token-mean aggregation the losses are those of the papers.
"""

from __future__ import annotations

import torch

from slime_rl.algorithms.batch import LossBatch, LossOutput, segment_mean
from slime_rl.algorithms.kl import clamp_log_ratio
from slime_rl.algorithms.policy_losses.clip import clip_bounds, clipped_surrogate
from slime_rl.config import Config


def gspo(config: Config, batch: LossBatch) -> LossOutput:
    """PPO's clipped loss with s = exp(mean_t log rho_t) of the response in place of rho_t; GSPO, arXiv 2507.18071.

    In the token form of the paper (GSPO-token): the value is s, the gradient s * grad log pi_theta(t); advantages may
    differ between tokens. The clip distances are far smaller than PPO's; the paper takes 3e-4 and 4e-4.
    """
    batch = batch.cleaned()
    log_ratio = batch.log_probs - batch.old_log_probs
    mean = segment_mean(log_ratio, batch.mask, batch.sample_ids, batch.num_samples).detach()[batch.sample_ids]
    ratio = clamp_log_ratio(mean + batch.log_probs - batch.log_probs.detach()).exp()
    loss, metrics = clipped_surrogate(config.algorithm, ratio, batch.advantages, batch.mask)
    return LossOutput(loss=loss, metrics={**metrics, "ppo_kl": -log_ratio.detach()})


def geo_mean(config: Config, batch: LossBatch) -> LossOutput:
    """-A exp(mean_t m_t), m_t = sign(A) min(sign(A) l_t, sign(A) clip(l_t, -eps, eps_high)), l_t = log rho_t.

    GMPO, arXiv 2507.20673: the geometric mean of token ratios that are clipped one by one, in log space (the paper
    takes 0.4 for both distances). A is the mean of the response's token advantages.
    """
    batch = batch.cleaned()
    ids, num = batch.sample_ids, batch.num_samples
    low, high = clip_bounds(config.algorithm)
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs)
    advantages = segment_mean(batch.advantages, batch.mask, ids, num)[ids]
    sign = advantages.sign()
    clipped = log_ratio.clamp(-low, high)
    chosen = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = segment_mean(chosen, batch.mask, ids, num).exp()[ids]
    is_clipped = (sign * clipped < sign * log_ratio).to(log_ratio.dtype)
    return LossOutput(
        loss=torch.where(batch.mask > 0, -advantages * ratio, 0.0),
        metrics={"pg_clipfrac": is_clipped, "ppo_kl": -log_ratio.detach()},
    )
