"""The algorithms by name. Listing them imports neither torch nor the algorithms."""

from __future__ import annotations

from slime_rl.protocols import AdvantageFunction, OffPolicyFunction, PolicyLossFunction
from slime_rl.registry import ExtensionPoint


def _in(module: str, *names: str) -> dict[str, str]:
    return {name: f"slime_rl.algorithms.{module}:{name}" for name in names}


ADVANTAGES = ExtensionPoint(
    flag="--advantage-estimator",
    protocol=AdvantageFunction,
    builtins={
        **_in("advantages.group", "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"),
        **_in("advantages.returns", "reinforce", "reinforce_plus_plus", "remax", "gae"),
    },
)

POLICY_LOSSES = ExtensionPoint(
    flag="--policy-loss",
    protocol=PolicyLossFunction,
    builtins={
        **_in("policy_losses.clip", "ppo_clip", "decoupled_ppo"),
        **_in("policy_losses.sequence", "gspo", "geo_mean"),
        **_in("policy_losses.soft", "cispo", "sapo", "gpg", "sft", "distillation"),
        **_in("policy_losses.covariance", "clip_cov", "kl_cov"),
    },
)

OFF_POLICY = ExtensionPoint(
    flag="--off-policy-correction",
    protocol=OffPolicyFunction,
    builtins=_in(
        "off_policy",
        *("none", "tis_token", "tis_sequence", "mis_token", "mis_sequence", "icepop"),
        *("geometric_rejection", "sequence_rejection", "opsm"),
    ),
)
