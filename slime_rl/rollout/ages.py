"""What becomes of groups whose tokens are too old for the step that would train on them: `--over-age`.

requeue, drop    waiting partial groups begin anew, generated groups leave the buffer
mask             groups train, without the tokens that are too old; those that have no other are generated anew
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from slime_rl.protocols import DataBuffer
from slime_rl.rollout.groups import GroupRunner
from slime_rl.types import Group


class AgeLimit:
    """Applies one `--over-age`. In every method `oldest` is the lowest weight version that may train."""

    def __init__(self, action: Literal["requeue", "drop", "mask"], buffer: DataBuffer, runner: GroupRunner) -> None:
        self.action: Literal["requeue", "drop", "mask"] = action
        self.buffer, self.runner = buffer, runner
        self.num_groups = self.num_tokens = 0  # over age since the last `metrics`

    def reserve(self, num_groups: int, oldest: int) -> list[Group]:
        """As the buffer's; partial groups with older tokens are what the prompt source has made again."""
        groups = self.buffer.reserve(num_groups)
        if self.action == "mask":
            return groups
        old = [group for group in groups if (version := group.oldest_version) is not None and version < oldest]
        if not old:
            return groups
        for group in old:
            self.count(1, group.reset())
            self.buffer.requeue(group)
        kept = {group.group_index for group in groups} - {group.group_index for group in old}
        again = self.reserve(len(old), oldest)
        return sorted([*(g for g in groups if g.group_index in kept), *again], key=lambda group: group.group_index)

    def let_go(self, oldest: int) -> int:
        """Have the buffer let go of generated groups that are too old; returns how many."""
        num_groups, num_tokens = self.buffer.expire(oldest, self.action)
        self.count(num_groups, num_tokens)
        return num_groups

    def mask(self, groups: Sequence[Group], oldest: int) -> list[Group]:
        """Taken groups with older tokens left out of the loss; replayed groups have a bound of their own.

        What the buffer holds stays as it is: a group may be replayed, and be masked by its age then.
        """
        if self.action != "mask":
            return list(groups)
        masked = []
        for group in groups:
            young, num_tokens = (group, 0) if group.replays else without_older(group, oldest)
            self.count(num_tokens > 0, num_tokens)
            masked.append(young)
        return masked

    def count(self, num_groups: int, num_tokens: int) -> None:
        """Tokens of groups that are over age: they have been sampled in vain."""
        self.note(num_groups, num_tokens)
        self.runner.wasted_tokens += num_tokens

    def note(self, num_groups: int, num_tokens: int) -> None:
        """The same for tokens that somebody else counts as wasted."""
        self.num_groups += num_groups
        self.num_tokens += num_tokens

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        counts = {
            "rollout/over_age_groups": float(self.num_groups),
            "rollout/over_age_tokens": float(self.num_tokens),
        }
        self.num_groups = self.num_tokens = 0
        return counts


def without_older(group: Group, oldest: int) -> tuple[Group, int]:
    """The group with tokens sampled by weights older than `oldest` out of the loss, and how many those are."""
    samples, num_masked = [], 0
    for sample in group.samples:
        pairs = zip(sample.loss_mask, sample.weight_versions, strict=True)
        mask = [0 if 0 <= version < oldest else kept for kept, version in pairs]
        num_masked += sum(sample.loss_mask) - sum(mask)
        samples.append(dataclasses.replace(sample, loss_mask=mask))
    return (dataclasses.replace(group, samples=samples), num_masked) if num_masked else (group, 0)
