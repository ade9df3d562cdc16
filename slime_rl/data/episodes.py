"""Samples as advantages compare them: those of one rollout_id are one episode, and each role of a group is a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from slime_rl.types import Sample


def role_of(sample: Sample) -> str:
    """The part that the sample's agent played in its game; "" where there is none."""
    state = sample.metadata.get("agent")
    return str(state.get("role") or "") if isinstance(state, dict) else ""


def episodes_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of each rollout_id together, in order of their first ones."""
    episodes: dict[int, list[Sample]] = {}
    for sample in samples:
        episodes.setdefault(sample.rollout_id, []).append(sample)
    return list(episodes.values())


def num_attempts(samples: Sequence[Sample]) -> int:
    """How many draws of the policy the samples of a group come from: an agent's branches and roles are of one."""
    return min(len({sample.index for sample in samples}), len({sample.rollout_id for sample in samples}))


def rewards_by_role(samples: Iterable[Sample]) -> list[list[float]]:
    """For each role of a group, the rewards of its episodes; an episode has the mean of its scored samples."""
    roles: dict[str, list[float]] = {}
    for episode in episodes_of(sample for sample in samples if sample.reward is not None):
        roles.setdefault(role_of(episode[0]), []).append(mean([sample.reward or 0.0 for sample in episode]))
    return list(roles.values())


def mean(rewards: Sequence[float]) -> float:
    """Exact where all are equal, so that equal episodes stay equal however many samples they were cut into."""
    return rewards[0] if min(rewards) == max(rewards) else fmean(rewards)
