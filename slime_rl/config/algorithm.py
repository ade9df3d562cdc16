from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slime_rl.config.checks import check, check_not_negative, check_positive
from slime_rl.config.flags import flag

REJECTION_RULES = ("token", "sequence", "geometric", "sequence_max", "mean_k2", "mean_k3", "opsm")
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
WEIGHTED_CORRECTIONS = ("tis_token", "tis_sequence", "mis_token", "mis_sequence", "icepop")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Algorithm: advantages, policy loss, KL, entropy and their weighting."""

    advantage_estimator: str = flag("grpo", aliases=("--advantage-path",))
    """How rewards become token advantages: a registered name or package.module:name."""

    policy_loss: str = flag("ppo_clip", aliases=("--loss-path",))
    """Loss per token: a registered name or package.module:name."""

    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"
    ] = "token-mean"
    """How token losses become one number; every denominator is counted over the whole update before any split."""

    loss_norm_length: int | None = None
    """Constant that seq-mean-token-sum-norm divides a sequence's sum by; --max-response-len when not given."""

    grpo_std_normalization: bool = True
    """Divide the group advantage by the group's standard deviation; off is Dr. GRPO."""

    normalize_advantages: bool = False
    """Whiten token advantages over the whole batch."""

    gamma: float = 1.0
    """Discount of the return."""

    lambd: float = 1.0
    """Lambda of generalised advantage estimation."""

    eps_clip: float = 0.2
    """Lower clip distance of the probability ratio."""

    eps_clip_high: float | None = None
    """Upper clip distance; --eps-clip when not given."""

    eps_clip_c: float | None = None
    """Dual clip: bound of the loss for negative advantages, above 1."""

    kl_coef: float = 0.0
    """KL to the reference model, taken off the reward token by token."""

    kl_target: float | None = None
    """KL per token (by --kl-reward-type) that --kl-coef is moved towards after every step; it stays when not given."""

    kl_horizon: float = 10_000.0
    """Episodes in which --kl-target changes --kl-coef by at most a fifth."""

    kl_reward_type: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL that --kl-coef takes off the reward."""

    use_kl_loss: bool = False
    """Add the KL to the reference model to the loss."""

    kl_loss_coef: float = 0.0
    """Its weight."""

    kl_loss_type: Literal["k1", "k2", "k3", "k3_unbiased", "abs"] = "k3"
    """Estimator of the KL (Schulman, Approximating KL Divergence); k3_unbiased has k3's value and k2's gradient."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    off_policy_correction: str = flag("none", aliases=("--off-policy-path",))
    """Weights for the gap between engine and trainer: none, tis_token, tis_sequence, mis_token, mis_sequence, icepop,
    geometric_rejection, sequence_rejection, opsm, or package.module:name."""

    off_policy_upper: float = flag(2.0, aliases=("--tis-clip",))
    """Upper bound of the off-policy weight."""

    off_policy_lower: float = flag(0.5, aliases=("--tis-clip-low",))
    """Lower bound, where the correction has one."""

    off_policy_rejection: tuple[str, ...] = ()
    """Rules that a token must pass, all of them, besides --off-policy-correction: token, sequence, geometric,
    sequence_max (ratios within the rejection bounds), mean_k2, mean_k3 (sequence mean within the KL bound), opsm."""

    off_policy_rejection_upper: float = 2.0
    """Upper bound of the ratios that --off-policy-rejection looks at."""

    off_policy_rejection_lower: float = 0.5
    """Lower bound of the ratios that --off-policy-rejection looks at."""

    off_policy_rejection_kl: float = 0.1
    """Upper bound of a sequence's mean KL in the rules mean_k2 and mean_k3."""

    opsm_delta: float = 1e-4
    """Off-policy sequence masking drops tokens of negative advantage where the sequence's mean KL is above this."""

    proximal_policy: Literal["recompute", "interpolate"] = "recompute"
    """Centre of the trust region of decoupled_ppo: the trainer's own pass before the update, or log-linear
    interpolation between engine and current policy by weight versions, which needs no extra pass."""

    behave_weight_cap: float | None = None
    """Upper bound of decoupled_ppo's weight, proximal over engine probability; none when not given."""

    sapo_tau_pos: float = 1.0
    """Temperature of sapo's soft gate for positive advantages."""

    sapo_tau_neg: float = 1.05
    """Temperature of sapo's soft gate for the other advantages."""

    cov_ratio: float = 2e-4
    """Share of an update's tokens that clip_cov and kl_cov act on."""

    clip_cov_lower: float = 1.0
    """Lowest covariance of log-prob and advantage that clip_cov may detach."""

    clip_cov_upper: float = 5.0
    """Highest covariance of log-prob and advantage that clip_cov may detach."""

    kl_cov_coef: float = 1.0
    """Weight of kl_cov's penalty."""

    distillation_reward_coef: float = 0.0
    """Weight of the reward's advantages beside the teacher's in the loss distillation."""

    value_clip: float = 0.2
    """Distance that the critic's value may move from the old one before its loss is clipped; 0 turns clipping off."""

    overlong_buffer_len: int | None = None
    """Soft penalty on the last this many tokens below --max-response-len (DAPO); none when not given."""

    overlong_penalty: float = 1.0
    """Most that the soft overlong penalty takes off a reward."""

    overlong_filter: bool = False
    """Mask responses that ran into the length limit out of the loss (DAPO); they still count in group statistics."""

    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    """Old policy of the ratio: recompute by the trainer, take the engine's, or auto: skip the extra pass when one
    update follows and the old policy is the current one."""

    def __post_init__(self) -> None:
        check_positive(eps_clip=self.eps_clip, eps_clip_high=self.eps_clip_high, loss_norm_length=self.loss_norm_length)
        check_positive(off_policy_upper=self.off_policy_upper, off_policy_lower=self.off_policy_lower)
        check_not_negative(kl_coef=self.kl_coef, kl_loss_coef=self.kl_loss_coef, entropy_coef=self.entropy_coef)
        self._check_off_policy()
        self._check_losses()
        for name, value in (("--gamma", self.gamma), ("--lambd", self.lambd)):
            check(0 <= value <= 1, name, "must be in [0, 1]", value)
        check(self.eps_clip < 1, "--eps-clip", "must be < 1", self.eps_clip)
        if self.eps_clip_c is not None:
            check(self.eps_clip_c > 1, "--eps-clip-c", "must be > 1", self.eps_clip_c)
            check(math.isfinite(self.eps_clip_c), "--eps-clip-c", "must be finite", self.eps_clip_c)
        check_positive(kl_target=self.kl_target, kl_horizon=self.kl_horizon)
        check(self.kl_target is None or self.kl_coef > 0, "--kl-target", "needs --kl-coef > 0", self.kl_target)
        check(self.use_kl_loss or self.kl_loss_coef == 0, "--kl-loss-coef", "needs --use-kl-loss", self.kl_loss_coef)

    def _check_off_policy(self) -> None:
        check_positive(
            off_policy_rejection_upper=self.off_policy_rejection_upper,
            off_policy_rejection_lower=self.off_policy_rejection_lower,
            off_policy_rejection_kl=self.off_policy_rejection_kl,
            behave_weight_cap=self.behave_weight_cap,
        )
        check_not_negative(opsm_delta=self.opsm_delta)
        for name, low, high in (
            ("--off-policy-lower", self.off_policy_lower, self.off_policy_upper),
            ("--off-policy-rejection-lower", self.off_policy_rejection_lower, self.off_policy_rejection_upper),
        ):
            check(low <= high, name, f"must be <= {name.replace('lower', 'upper')} ({high})", low)
        for rule in self.off_policy_rejection:
            check(rule in REJECTION_RULES, "--off-policy-rejection", f"takes {', '.join(REJECTION_RULES)}", rule)
        if self.policy_loss == "decoupled_ppo":
            check(
                self.off_policy_correction not in WEIGHTED_CORRECTIONS,
                "--off-policy-correction",
                "must not add weights to --policy-loss decoupled_ppo, which has its own; use --off-policy-rejection",
                self.off_policy_correction,
            )
            check(
                self.proximal_policy == "interpolate" or self.old_log_probs != "rollout",
                "--old-log-probs",
                "must not be rollout with --policy-loss decoupled_ppo unless --proximal-policy is interpolate",
                self.old_log_probs,
            )

    def _check_losses(self) -> None:
        check_positive(
            sapo_tau_pos=self.sapo_tau_pos,
            sapo_tau_neg=self.sapo_tau_neg,
            cov_ratio=self.cov_ratio,
            overlong_buffer_len=self.overlong_buffer_len,
        )
        check_not_negative(
            value_clip=self.value_clip,
            kl_cov_coef=self.kl_cov_coef,
            distillation_reward_coef=self.distillation_reward_coef,
            overlong_penalty=self.overlong_penalty,
        )
        check(self.cov_ratio <= 1, "--cov-ratio", "must be <= 1", self.cov_ratio)
        check(
            self.clip_cov_lower <= self.clip_cov_upper,
            "--clip-cov-lower",
            f"must be <= --clip-cov-upper ({self.clip_cov_upper})",
            self.clip_cov_lower,
        )

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_loss or self.kl_coef > 0
