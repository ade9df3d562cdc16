"""Drop prompts that the model nearly always solves, and keep the rest, hopeless ones too.

    --dynamic-filter-path plugins.filters.too_easy:too_easy

The run counts what it drops as rollout/groups_dropped/too_easy. A filter is a plain function; one with a setting is
made by another function, as `solved_over` shows: write `filter_90 = solved_over(0.9)` in a module of yours, name that.
"""

from __future__ import annotations

from slime_rl.config import Config
from slime_rl.protocols import GroupFilter
from slime_rl.types import Sample

RIGHT = 1.0  # rewards from here on count as solved


def solved_over(share: float) -> GroupFilter:
    """A filter that drops groups in which more than `share` of the samples are solved.

    Raises:
        ValueError: `share` is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"solved_over takes a share in [0, 1), got {share}")

    def keep_or_reason(config: Config, group: list[Sample]) -> str | None:
        solved = sum(sample.reward is not None and sample.reward >= RIGHT for sample in group)
        return "too_easy" if solved > share * len(group) else None

    return keep_or_reason


too_easy = solved_over(0.8)
