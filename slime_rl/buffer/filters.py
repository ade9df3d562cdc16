"""Built-in policies: which generated groups train next, and which complete groups may train at all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slime_rl.config import Config
from slime_rl.data.episodes import mean, rewards_by_role
from slime_rl.protocols import GroupFilter, SampleFilter
from slime_rl.registry import own_code
from slime_rl.types import Group, Sample


class GroupSummary(NamedTuple):
    """What a ranking may know of a group, so that its tokens need not be in memory."""

    group_index: int
    oldest_version: int  # -1 when no model sampled any token
    reward_mean: float
    reward_std: float


def summarise(group: Group) -> GroupSummary:
    """Rewards as advantages compare them: by episode, and within each role; the spread is that of the widest role."""
    rewards = rewards_by_role(group.samples)
    average = statistics.fmean(reward for role in rewards for reward in role) if rewards else 0.0
    oldest = group.oldest_version
    spread = max(map(reward_std, rewards), default=0.0)
    return GroupSummary(group.group_index, -1 if oldest is None else oldest, average, spread)


def reward_std(rewards: Sequence[float]) -> float:
    """Population standard deviation, exactly 0 for equal rewards: sums of equal floats may differ in the last bit."""
    if not rewards or min(rewards) == max(rewards):
        return 0.0
    mean = statistics.fmean(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


@dataclass(frozen=True)
class Ranking:
    """A BufferFilter that takes the groups with the smallest `key`. The buffer ranks by summaries, without payloads."""

    key: Callable[[GroupSummary], Any]

    def __call__(self, config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
        return sorted(groups, key=lambda group: self.key(summarise(group)))[:num_groups]


oldest_first = Ranking(lambda group: group.group_index)
freshest_first = Ranking(lambda group: (-group.oldest_version, group.group_index))
stalest_first = Ranking(lambda group: (group.oldest_version, group.group_index))
by_reward_variance = Ranking(lambda group: (-group.reward_std, group.group_index))


def nonzero_std(config: Config, group: list[Sample]) -> str | None:
    """Keep groups whose rewards differ: equal ones give no advantage, so nothing to learn.

    Compared are episodes, and where agents play roles, those of one role.
    """
    return "zero_std" if all(min(rewards) == max(rewards) for rewards in _rewards(group)) else None


def reward_band(config: Config, group: list[Sample]) -> str | None:
    """Keep groups whose mean reward (of one of its roles, where agents play several) lies strictly between the two
    values of --reward-band."""
    low, high = config.buffer.reward_band
    means = [mean(rewards) for rewards in _rewards(group)]
    if any(low < average < high for average in means):
        return None
    return "reward_too_low" if means[0] <= low else "reward_too_high"


def not_all_truncated(config: Config, group: list[Sample]) -> str | None:
    """Keep groups in which at least one response ended before the length limit."""
    return None if any(sample.status != "truncated" for sample in group) else "all_truncated"


def completed(config: Config, group: list[Sample]) -> list[str | None]:
    """A sample filter: responses that ran into a length limit do not train."""
    return ["truncated" if sample.status == "truncated" else None for sample in group]


def distinct(config: Config, group: list[Sample]) -> list[str | None]:
    """A sample filter: of responses with the same tokens, to the same prompt, the first trains."""
    seen: set[tuple[int, ...]] = set()
    reasons: list[str | None] = []
    for sample in group:
        tokens = tuple(sample.tokens)  # with the prompt: an agent's calls have different ones
        reasons.append("repeated" if tokens in seen else None)
        seen.add(tokens)
    return reasons


def filter_samples(config: Config, sample_filter: SampleFilter, group: Group) -> tuple[str | None, int]:
    """Take out of `group` what the filter does not let train.

    Returns (None, or the reason to drop the group because no sample is left; tokens of the loss that will not train).

    Raises:
        ValueError: the filter raised, changed the samples, or returned something else than it must.
    """
    flag = f"--sample-filter-path {config.buffer.sample_filter_path}"
    answer: Any = _ask(flag, config, sample_filter, group)
    if answer is None or isinstance(answer, str):
        answer = [answer] * len(group.samples)
    if not isinstance(answer, list) or not all(r is None or (isinstance(r, str) and r) for r in answer):
        raise ValueError(f"{flag} must return None, a reason, or a list of them, got {answer!r}")
    if len(answer) != len(group.samples):
        raise ValueError(f"{flag} must return one entry per sample, {len(group.samples)}, got {len(answer)}")
    reasons = {i: reason for i, reason in enumerate(answer) if reason is not None}
    if len(reasons) == len(group.samples):
        different = sorted(set(reasons.values()))
        tokens = sum(sample.num_trained_tokens for sample in group.samples)
        return different[0] if len(different) == 1 else "no_sample_left", tokens
    return None, group.leave_out(reasons)


def drop_reason(config: Config, group_filter: GroupFilter, group: Group) -> str | None:
    """Why --dynamic-filter-path drops the group; None where it keeps it.

    Raises:
        ValueError: the filter raised, changed the samples, or returned something else than it must.
    """
    flag = f"--dynamic-filter-path {config.buffer.dynamic_filter_path}"
    reason: Any = _ask(flag, config, group_filter, group)
    if reason is not None and not (isinstance(reason, str) and reason):
        raise ValueError(f"{flag} must return None, which keeps the group, or a reason, got {reason!r}")
    return reason


def _ask(flag: str, config: Config, group_filter: GroupFilter | SampleFilter, group: Group) -> Any:
    """What the filter returns. An own one gets copies, which take longer than a built-in one needs to judge."""
    if ":" not in flag:
        with own_code(flag, f", for group {group.group_index}"):
            return group_filter(config, group.samples)
    from slime_rl.buffer.judging import judge_samples  # imports torch, which the driver does without

    return judge_samples(flag, group, lambda samples: group_filter(config, samples))


def _rewards(group: list[Sample]) -> list[list[float]]:
    missing = sum(sample.reward is None for sample in group)
    if missing or not group:
        raise ValueError(f"--dynamic-filter-path: {missing} of {len(group)} samples have no reward yet")
    return rewards_by_role(group)
