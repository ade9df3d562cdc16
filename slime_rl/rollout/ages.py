"""What becomes of groups whose tokens are too old for the step that would train on them: `--over-age`.

requeue, drop    waiting partial groups begin anew, generated groups leave the buffer
mask             groups train, without the tokens that are too old
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from slime_rl.protocols import DataBuffer
from slime_rl.rollout.groups import GroupRunner, reset
from slime_rl.types import Group


class AgeLimit:
    """Applies one `--over-age`. In every method `oldest` is the lowest weight version that may train."""

    def __init__(self, action: Literal["requeue", "drop", "mask"], buffer: DataBuffer, runner: GroupRunner) -> None:
        self.action: Literal["requeue", "drop", "mask"] = action
        self.buffer, self.runner = buffer, runner
        self.num_groups = self.num_tokens = 0  # over age since the last `metrics`

    def begin_anew(self, groups: list[Group], oldest: int) -> list[Group]:
        """The reserved `groups`; partial ones with older tokens are bare prompts again."""
        if self.action != "mask":
            for group in groups:
                version = group.oldest_version
                if version is not None and version < oldest:
                    self.count(1, reset(group.samples))
        return groups

    def let_go(self, oldest: int) -> int:
        """Have the buffer let go of generated groups with older tokens; returns how many."""
        expired = 0 if self.action == "mask" else self.buffer.expire(oldest, self.action)
        self.num_groups += expired
        return expired

    def mask(self, groups: Iterable[Group], oldest: int) -> None:
        """Leave older tokens of taken groups out of the loss; replayed groups have a bound of their own."""
        if self.action == "mask":
            for group in groups:
                masked = 0 if group.replays else mask_older_than(group, oldest)
                self.count(masked > 0, masked)

    def count(self, num_groups: int, num_tokens: int) -> None:
        """Tokens of groups that are over age: they have been sampled in vain."""
        self.num_groups += num_groups
        self.num_tokens += num_tokens
        self.runner.wasted_tokens += num_tokens

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        counts = {
            "rollout/over_age_groups": float(self.num_groups),
            "rollout/over_age_tokens": float(self.num_tokens),
        }
        self.num_groups = self.num_tokens = 0
        return counts


def mask_older_than(group: Group, oldest: int) -> int:
    """Leave tokens sampled by weights older than `oldest` out of the loss; returns how many."""
    masked = 0
    for sample in group.samples:
        for i, version in enumerate(sample.weight_versions):
            if sample.loss_mask[i] and 0 <= version < oldest:
                sample.loss_mask[i] = 0
                masked += 1
    return masked
