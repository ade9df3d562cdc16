"""Rewards: how responses are scored, always a whole group at a time. `--rm-type` names one of these built-ins."""

from slime_rl.protocols import RewardFunction
from slime_rl.registry import ExtensionPoint

REWARDS = ExtensionPoint(
    flag="--rm-type",
    protocol=RewardFunction,
    builtins={
        "episode": "slime_rl.rollout.rewards.episode:episode",
        "exact": "slime_rl.rollout.rewards.text:exact",
        "f1": "slime_rl.rollout.rewards.text:f1",
        "math": "slime_rl.rollout.rewards.mathematics:math",
        "multiple_choice": "slime_rl.rollout.rewards.multiple_choice:multiple_choice",
        "numeric": "slime_rl.rollout.rewards.numeric:numeric",
        "regex_format": "slime_rl.rollout.rewards.regex_format:regex_format",
    },
)

# Slow imports of a built-in reward that `ProcessFence.prewarm` can do while the engines start.
FENCED_MODULES: dict[str, str] = {
    "math": "slime_rl.rollout.rewards.mathematics_fenced",
    "regex_format": "slime_rl.rollout.rewards.regex_format",
}
