"""Corrections for the gap between the engine that sampled and the trainer that learns.

rho_t = exp(log pi_old - log pi_rollout), trainer over engine, both before the update. A sequence's ratio is the product
of its tokens' ratios, the geometric one their geometric mean. Each correction returns

    weights `[T]`  multiply the policy loss, without gradient
    mask    `[T]`  rejected tokens are 0: no policy, KL or entropy loss; denominators still count them, as the estimator
                   E[1(kept) w A] asks

TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025. MIS and the sequence
rules: Liu et al., "When Speed Kills Stability", 2025. IcePop: Ring-1T, arXiv 2510.18855. OPSM: DeepSeek-V3.2, arXiv
2512.02556. `--off-policy-upper/lower` are the bounds of a correction, `--off-policy-rejection-*` those of extra rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch, OffPolicyOutput, segment_mean, segment_sum
from slime_rl.algorithms.kl import clamp_log_ratio
from slime_rl.config import Config


def none(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """Weights 1, nothing rejected; the gap is measured all the same."""
    return _output(batch, torch.ones_like(batch.mask))


def tis_token(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """min(rho_t, upper): truncated importance sampling."""
    return _output(batch, token_ratio(batch).clamp(max=config.algorithm.off_policy_upper))


def tis_sequence(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """min(prod_t rho_t, upper), the same for all tokens of a sample."""
    return _output(batch, sequence_ratio(batch).clamp(max=config.algorithm.off_policy_upper))


def mis_token(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """rho_t where rho_t <= upper; tokens above are rejected: masked importance sampling."""
    ratio = token_ratio(batch)
    return _output(batch, ratio, ratio <= config.algorithm.off_policy_upper)


def mis_sequence(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """prod_t rho_t where that is <= upper; samples above are rejected."""
    ratio = sequence_ratio(batch)
    return _output(batch, ratio, ratio <= config.algorithm.off_policy_upper)


def icepop(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """rho_t where lower <= rho_t <= upper; tokens outside are rejected."""
    ratio = token_ratio(batch)
    return _output(batch, ratio, _within(ratio, config.algorithm.off_policy_lower, config.algorithm.off_policy_upper))


def geometric_rejection(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """Weights 1; samples whose geometric mean ratio is outside [lower, upper] are rejected."""
    kept = _within(geometric_ratio(batch), config.algorithm.off_policy_lower, config.algorithm.off_policy_upper)
    return _output(batch, torch.ones_like(batch.mask), kept)


def sequence_rejection(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """Weights 1; samples whose ratio prod_t rho_t is outside [lower, upper] are rejected."""
    kept = _within(sequence_ratio(batch), config.algorithm.off_policy_lower, config.algorithm.off_policy_upper)
    return _output(batch, torch.ones_like(batch.mask), kept)


def opsm(config: Config, batch: LossBatch) -> OffPolicyOutput:
    """Weights 1; off-policy sequence masking (see `kept_by_opsm`)."""
    return _output(batch, torch.ones_like(batch.mask), kept_by_opsm(config, batch))


def kept_by_opsm(config: Config, batch: LossBatch) -> Tensor:
    """`[T]` bool: False where A_t < 0 and the sample's mean log pi_rollout - log pi_theta is above `--opsm-delta`."""
    batch = batch.cleaned()
    gap = batch.rollout_log_probs - batch.log_probs.detach()
    mean = segment_mean(gap, batch.mask, batch.sample_ids, batch.num_samples)[batch.sample_ids]
    return ~((batch.advantages < 0) & (mean > config.algorithm.opsm_delta))


def kept_by_rules(config: Config, batch: LossBatch) -> Tensor:
    """`[T]` bool: the tokens that pass every rule of `--off-policy-rejection`; all of them without a rule."""
    algorithm = config.algorithm
    low, high = algorithm.off_policy_rejection_lower, algorithm.off_policy_rejection_upper
    kept = torch.ones_like(batch.mask, dtype=torch.bool)
    for rule in algorithm.off_policy_rejection:
        if rule == "opsm":
            kept &= kept_by_opsm(config, batch)
        elif rule in ("mean_k2", "mean_k3"):
            kept &= _sequence_kl(batch, rule) <= algorithm.off_policy_rejection_kl
        elif rule == "sequence_max":
            outside = (~_within(token_ratio(batch), low, high)).to(batch.mask.dtype) * batch.mask
            kept &= segment_sum(outside, batch.sample_ids, batch.num_samples)[batch.sample_ids] == 0
        else:
            ratio = {"token": token_ratio, "sequence": sequence_ratio, "geometric": geometric_ratio}[rule]
            kept &= _within(ratio(batch), low, high)
    return kept


def log_gap(batch: LossBatch) -> Tensor:
    """log rho `[T]`, not clamped, no gradient, 0 on masked tokens."""
    return torch.where(batch.mask > 0, batch.old_log_probs - batch.rollout_log_probs, 0.0).detach()


def token_ratio(batch: LossBatch) -> Tensor:
    """rho_t `[T]`; 1 on masked tokens."""
    return clamp_log_ratio(log_gap(batch)).exp()


def sequence_ratio(batch: LossBatch) -> Tensor:
    """Product of a sample's rho_t, on each of its tokens `[T]`."""
    total = segment_sum(log_gap(batch), batch.sample_ids, batch.num_samples)
    return clamp_log_ratio(total).exp()[batch.sample_ids]


def geometric_ratio(batch: LossBatch) -> Tensor:
    """Geometric mean of a sample's rho_t, on each of its tokens `[T]`; the inverse of its perplexity ratio."""
    mean = segment_mean(log_gap(batch), batch.mask, batch.sample_ids, batch.num_samples)
    return clamp_log_ratio(mean).exp()[batch.sample_ids]


def gap_metrics(batch: LossBatch) -> dict[str, Tensor]:
    """How far engine and trainer are apart, `[T]` each; k1 and k3 estimate KL(rollout || old).

    `finish_metrics` makes the effective sample size of ratio and chi2.
    """
    gap, ratio = clamp_log_ratio(log_gap(batch)), token_ratio(batch)
    return {
        "train_rollout_logprob_abs_diff": log_gap(batch).abs(),
        "off_policy/kl_k1": -gap,
        "off_policy/kl_k3": torch.expm1(gap) - gap,
        "off_policy/chi2": ratio.square() - 1,
        "off_policy/ratio": ratio,
        "off_policy/ratio_max": torch.where(batch.mask > 0, ratio, 0.0),
        "off_policy/perplexity_ratio": 1 / geometric_ratio(batch),
    }


def _sequence_kl(batch: LossBatch, rule: str) -> Tensor:
    gap = clamp_log_ratio(log_gap(batch))
    kl = gap.square() / 2 if rule == "mean_k2" else torch.expm1(gap) - gap
    return segment_mean(kl, batch.mask, batch.sample_ids, batch.num_samples)[batch.sample_ids]


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)


def _output(batch: LossBatch, weights: Tensor, kept: Tensor | None = None) -> OffPolicyOutput:
    mask = batch.mask if kept is None else torch.where(kept, batch.mask, 0.0)
    weights = torch.where(batch.mask > 0, weights, 1.0)
    return OffPolicyOutput(weights=weights, mask=mask, metrics={**gap_metrics(batch), "off_policy/weight": weights})
