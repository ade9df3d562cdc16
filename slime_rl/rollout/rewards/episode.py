"""The reward that an episode brought with it: from an environment, or from an agent behind the gateway."""

from __future__ import annotations

import math
from numbers import Real

from slime_rl.config import Config
from slime_rl.types import Sample


async def episode(config: Config, group: list[Sample]) -> list[float]:
    """`metadata["agent"]["reward"]` of each sample.

    Raises:
        ValueError: a sample without one; says who sets it.
    """
    return [_reward_of(sample) for sample in group]


def _reward_of(sample: Sample) -> float:
    state = sample.metadata.get("agent")
    reward = state.get("reward") if isinstance(state, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(
            f"--rm-type episode: sample {sample.index} has no reward of its own, got {reward!r}; it is set by "
            "--generate-function-path environment_loop, or by an agent of --agent-path that returns or posts one"
        )
    return float(reward)
