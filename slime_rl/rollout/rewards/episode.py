"""The reward that an episode brought with it: from an environment, or from an agent behind the gateway."""

from __future__ import annotations

from slime_rl.config import Config
from slime_rl.types import Sample, finite_number


async def episode(config: Config, group: list[Sample]) -> list[float]:
    """`metadata["agent"]["reward"]` of each sample.

    Raises:
        ValueError: a sample without one; says who sets it.
    """
    return [_reward_of(sample) for sample in group]


def _reward_of(sample: Sample) -> float:
    state = sample.metadata.get("agent")
    reward = state.get("reward") if isinstance(state, dict) else None
    number = finite_number(reward)
    if number is None:
        raise ValueError(
            f"--rm-type episode: sample {sample.index} has no reward of its own, got {reward!r:.300}; it is set by "
            "--generate-function-path environment_loop, or by an agent of --agent-path that returns or posts one"
        )
    return number
