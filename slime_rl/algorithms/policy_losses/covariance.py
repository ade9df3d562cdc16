"""Clip-Cov and KL-Cov: hold back the few tokens that make entropy collapse (Cui et al., arXiv 2505.22617).

Those are the tokens with a high covariance (log pi - mean)(A - mean). The means and the choice are made once over the
whole optimizer update from log pi_old, not per micro-batch from log pi_theta, so that the loss does not depend on how
the update is split; before the first update of a rollout the two are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch, LossOutput
from slime_rl.algorithms.kl import clamp_log_ratio
from slime_rl.algorithms.policy_losses.clip import clipped_surrogate
from slime_rl.config import Config


def select_by_covariance(config: Config, *, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor | None:
    """The tokens of one optimizer update that clip_cov or kl_cov acts on: `[T]` bool; None for every other loss.

    k = max(1, `--cov-ratio` * unmasked tokens). kl_cov takes the k highest covariances. clip_cov takes k of those
    within `--clip-cov-lower/upper`: where the paper draws at random, here evenly spread over their ranks, which needs
    no random state and does not depend on the order of the samples.
    """
    loss = config.algorithm.policy_loss
    if loss not in ("clip_cov", "kl_cov"):
        return None
    keep = mask > 0
    selected = torch.zeros_like(keep)
    chosen, scores = torch.nonzero(keep).flatten(), advantages[keep].double()
    if len(chosen) == 0:
        return selected
    log_probs = old_log_probs[keep].double()
    covariance = (log_probs - log_probs.mean()) * (scores - scores.mean())
    count = max(1, int(config.algorithm.cov_ratio * len(chosen)))
    ranked = torch.argsort(covariance, descending=True, stable=True)
    if loss == "clip_cov":
        within = (covariance > config.algorithm.clip_cov_lower) & (covariance < config.algorithm.clip_cov_upper)
        ranked = ranked[within[ranked]]
        count = min(count, len(ranked))
        picks = (torch.arange(count, device=ranked.device) * 2 + 1) * len(ranked) // max(1, 2 * count)
    else:
        picks = torch.arange(count, device=ranked.device)
    selected[chosen[ranked[picks]]] = True
    return selected


def clip_cov(config: Config, batch: LossBatch) -> LossOutput:
    """PPO's clipped loss, but 0 without gradient on the selected tokens.

    Raises:
        ValueError: the batch has no `cov_selected` (see `select_by_covariance`).
    """
    selected = batch.need("cov_selected", "--policy-loss clip_cov")
    batch = batch.cleaned()
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs)
    mask = torch.where(selected, 0.0, batch.mask)
    loss, metrics = clipped_surrogate(config.algorithm, log_ratio.exp(), batch.advantages, mask)
    metrics |= {"ppo_kl": -log_ratio.detach(), "cov_selected": selected.to(loss.dtype)}
    return LossOutput(loss=loss, metrics=metrics)


def kl_cov(config: Config, batch: LossBatch) -> LossOutput:
    """-rho A, plus `--kl-cov-coef` * |log rho| on the selected tokens.

    Raises:
        ValueError: the batch has no `cov_selected` (see `select_by_covariance`).
    """
    selected = batch.need("cov_selected", "--policy-loss kl_cov")
    batch = batch.cleaned()
    log_ratio = clamp_log_ratio(batch.log_probs - batch.old_log_probs)
    penalty = torch.where(selected, config.algorithm.kl_cov_coef * log_ratio.abs(), 0.0)
    loss = torch.where(batch.mask > 0, penalty - log_ratio.exp() * batch.advantages, 0.0)
    metrics = {"ppo_kl": -log_ratio.detach(), "cov_selected": selected.to(loss.dtype)}
    return LossOutput(loss=loss, metrics=metrics)
