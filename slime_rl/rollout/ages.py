"""What becomes of groups whose tokens are too old for the step that would train on them: `--over-age`.

requeue, drop    waiting partial groups begin anew, generated groups leave the buffer
mask             groups train, without the tokens that are too old
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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


def without_older(group: Group, oldest: int) -> tuple[Group, int]:
    """The group with tokens sampled by weights older than `oldest` out of the loss, and how many those are."""
    samples, num_masked = [], 0
    for sample in group.samples:
        pairs = zip(sample.loss_mask, sample.weight_versions, strict=True)
        mask = [0 if 0 <= version < oldest else kept for kept, version in pairs]
        num_masked += sum(sample.loss_mask) - sum(mask)
        samples.append(dataclasses.replace(sample, loss_mask=mask))
    return (dataclasses.replace(group, samples=samples), num_masked) if num_masked else (group, 0)
