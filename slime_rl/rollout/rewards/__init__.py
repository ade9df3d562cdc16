"""Rewards: how responses are scored, always a whole group at a time. `--rm-type` names one of these built-ins."""

from slime_rl.protocols import RewardFunction
from slime_rl.registry import ExtensionPoint

REWARDS = ExtensionPoint(
    flag="--rm-type",
    protocol=RewardFunction,
    builtins={
        "code": "slime_rl.rollout.rewards.code:code",
        "episode": "slime_rl.rollout.rewards.episode:episode",
        "exact": "slime_rl.rollout.rewards.text:exact",
        "f1": "slime_rl.rollout.rewards.text:f1",
        "json_schema": "slime_rl.rollout.rewards.json_schema:json_schema",
        "judge": "slime_rl.rollout.rewards.judge:judge",
        "math": "slime_rl.rollout.rewards.mathematics:math",
        "mixture": "slime_rl.rollout.rewards.mixture:mixture",
        "multiple_choice": "slime_rl.rollout.rewards.multiple_choice:multiple_choice",
        "numeric": "slime_rl.rollout.rewards.numeric:numeric",
        "regex_format": "slime_rl.rollout.rewards.regex_format:regex_format",
        "remote": "slime_rl.rollout.rewards.remote:remote",
        "reward_model": "slime_rl.rollout.rewards.remote:reward_model",
    },
)

# Slow imports of a built-in reward that `ProcessFence.prewarm` can do while the engines start.
FENCED_MODULES: dict[str, str] = {
    "code": "slime_rl.rollout.rewards.code_fenced",
    "json_schema": "slime_rl.rollout.rewards.json_schema_fenced",
    "math": "slime_rl.rollout.rewards.mathematics_fenced",
    "regex_format": "slime_rl.rollout.rewards.regex_format",
}
