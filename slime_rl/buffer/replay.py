"""Trained groups that may train again (`--replay-groups`, off by default), chosen by how much they teach.

    commit(step) ──spread of rewards──► pool ──take(a later step)──► replayed, at most --replay-max-uses times
                                          └──too many, too old, used up──► forgotten

A replayed group stays committed in the ledger: it trained once as a fresh group, and each replay is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime_rl.buffer.filters import GroupSummary
from slime_rl.config import Config


@dataclass
class _Entry:
    summary: GroupSummary
    step: int  # that it last trained in
    uses: int = 0


class ReplayPool:
    """Which trained groups are kept, and which of them train in a step. Their payloads are kept by the buffer."""

    def __init__(self, config: Config) -> None:
        options = config.buffer
        self.per_step, self.capacity = options.replay_groups, options.replay_pool_groups
        self.max_uses, self.max_age = options.replay_max_uses, options.replay_max_age
        # With --rollout-ahead, commit(s) may come before or after take(s + 1): what it adds is chosen from later on,
        # so that a step's choice does not depend on which came first.
        self.delay = 1 + config.rollout.rollout_ahead
        self.num_replayed = 0
        self.of_step: dict[int, list[int]] = {}  # taken, not yet committed
        self._promised: dict[int, list[int]] = {}  # as `of_step` was when the state was saved
        self._entries: dict[int, _Entry] = {}

    def available(self, step: int) -> int:
        """Groups that `step` would replay."""
        return len(self.eligible(step))

    def choose(self, step: int, count: int) -> None:
        """Let `step` replay `count` of the groups available to it, those with the widest spread of rewards."""
        self.of_step[step] = self.eligible(step)[:count]
        self._promised.pop(step, None)

    def uses(self, group_index: int) -> int:
        """How often a group has been replayed."""
        return self._entries[group_index].uses

    def trained(self, step: int, fresh: Iterable[GroupSummary]) -> list[int]:
        """`step` has trained: its groups enter the pool. Returns the groups whose payload is no longer needed."""
        forgotten: list[int] = []
        for group_index in self.of_step.pop(step, []):
            self.num_replayed += 1
            entry = self._entries[group_index]
            entry.uses, entry.step = entry.uses + 1, step
        for summary in fresh:
            if summary.reward_std > 0:
                self._entries[summary.group_index] = _Entry(summary, step)
            else:
                forgotten.append(summary.group_index)
        taken = self._taken()
        done = {i for i, entry in self._entries.items() if i not in taken and self._is_done(entry, step + 1)}
        waiting = sorted((i for i in self._entries if i not in taken and i not in done), key=self._rank)
        for group_index in [*done, *waiting[self.capacity :]]:
            del self._entries[group_index]
            forgotten.append(group_index)
        return forgotten

    def dismissed(self) -> list[int]:
        """Let go of all groups when none is to be replayed, as after a resume without --replay-groups."""
        forgotten = [] if self.per_step else self.groups()
        for group_index in forgotten:
            del self._entries[group_index]
        self._promised = self._promised if self.per_step else {}
        return forgotten

    def groups(self) -> list[int]:
        """All groups of the pool."""
        return list(self._entries)

    def eligible(self, step: int) -> list[int]:
        """What `step` would replay, the best first."""
        if self.per_step == 0:
            return []
        if step in self._promised:
            return self._promised[step]
        taken = self._taken()
        free = [
            index
            for index, entry in self._entries.items()
            if index not in taken and entry.step <= step - self.delay and not self._is_done(entry, step)
        ]
        return sorted(free, key=self._rank)[: self.per_step]

    def _taken(self) -> set[int]:
        """Groups that a step which has not trained yet replays."""
        steps = [*self.of_step.values(), *self._promised.values()]
        return {index for groups in steps for index in groups}

    def _is_done(self, entry: _Entry, step: int) -> bool:
        too_old = self.max_age is not None and entry.summary.oldest_version < step - self.max_age
        return too_old or entry.uses >= self.max_uses

    def _rank(self, group_index: int) -> tuple[float, int, int]:
        summary = self._entries[group_index].summary
        return (-summary.reward_std, -summary.oldest_version, group_index)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        entries = [[*entry.summary, entry.step, entry.uses] for entry in self._entries.values()]
        promised = sorted((self._promised | self.of_step).items())
        return {"entries": entries, "promised": [list(item) for item in promised], "replayed": self.num_replayed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.of_step = {}
        self.num_replayed = int(state["replayed"])
        self._entries = {row[0]: _Entry(GroupSummary(*row[:4]), row[4], row[5]) for row in state["entries"]}
        self._promised = {int(step): list(groups) for step, groups in state["promised"]}
        if odd := sorted(self._taken() - self._entries.keys()):
            raise ValueError(f"steps replay groups that are not in the pool: {odd[:5]}")
