"""The account of every prompt group: which state each is in, and which way it may go. Knows nothing of payloads.

              ┌──────────requeue──────────┬──────send_back───────┐
              ▼                           │                      │
           waiting ──reserve──► reserved ─┴──generate──► generated ──admit(step)──► admitted(step) ──commit──► committed
                                   ▲      │                      │
              new prompts ──open───┘      └──────drop(reason)────┴──► dropped

A group is in exactly one state at any time. Committed and dropped groups are folded into ranges and counters, so the
account grows with what is under way, not with what is done.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import KeysView
from enum import StrEnum
from typing import Any

from slime_rl.buffer.ranges import RangeSet, check_ranges, to_ranges


class State(StrEnum):
    WAITING = "waiting"
    RESERVED = "reserved"
    GENERATED = "generated"
    ADMITTED = "admitted"
    COMMITTED = "committed"
    DROPPED = "dropped"


class Ledger:
    """See the picture above. Every method raises ValueError, naming the group and its state, for a way not in it."""

    def __init__(self) -> None:
        self.next_group_index = 0
        self.admitted: dict[int, list[int]] = {}  # step -> groups in training order
        self.drop_reasons: Counter[str] = Counter()
        self.requeue_reasons: Counter[str] = Counter()
        self.last_committed_step: int | None = None
        self._live: dict[int, State] = {}
        self._counts: Counter[State] = Counter()
        self._waiting: list[int] = []  # heap; may hold groups that went on
        self._committed, self._dropped = RangeSet(), RangeSet()

    def state_of(self, group_index: int) -> State | None:
        """None for a group that was never opened."""
        if group_index in self._live:
            return self._live[group_index]
        if group_index in self._committed:
            return State.COMMITTED
        return State.DROPPED if group_index in self._dropped else None

    def open(self) -> int:
        """A new group, reserved at once; returns its index, which no other group ever has."""
        group_index = self.next_group_index
        self.next_group_index += 1
        self._set(group_index, State.RESERVED)
        return group_index

    def reserve(self) -> int | None:
        """waiting -> reserved for the lowest index; None when nothing waits."""
        while self._waiting:
            group_index = heapq.heappop(self._waiting)
            if self._live.get(group_index) is State.WAITING:
                self._set(group_index, State.RESERVED)
                return group_index
        return None

    def requeue(self, group_index: int) -> None:
        """reserved -> waiting"""
        self._require(group_index, "requeue", State.RESERVED)
        self._wait(group_index)

    def send_back(self, group_index: int, reason: str) -> None:
        """generated -> waiting; counted under `reason`."""
        self._require(group_index, "send back", State.GENERATED)
        self._wait(group_index)
        self.requeue_reasons[reason] += 1

    def check_generate(self, group_index: int) -> None:
        """Raise ValueError where `generate` would."""
        self._require(group_index, "admit", State.RESERVED)

    def generate(self, group_index: int) -> None:
        """reserved -> generated"""
        self.check_generate(group_index)
        self._set(group_index, State.GENERATED)

    def drop(self, group_index: int, reason: str) -> None:
        """reserved or generated -> dropped(reason)"""
        self._require(group_index, "drop", State.RESERVED, State.GENERATED)
        if not reason or not isinstance(reason, str):
            raise ValueError(f"group {group_index} cannot be dropped without a reason, which is a word; got {reason!r}")
        self._forget(group_index)
        self._dropped.add(group_index)
        self.drop_reasons[reason] += 1

    def admit(self, step: int, group_indices: list[int]) -> None:
        """generated -> admitted(step) for all of them or, if one may not, for none."""
        if step in self.admitted:
            raise ValueError(f"step {step} already has its {len(self.admitted[step])} groups")
        if self.last_committed_step is not None and step <= self.last_committed_step:
            raise ValueError(f"step {step} cannot take groups: step {self.last_committed_step} is committed already")
        if len(set(group_indices)) < len(group_indices):
            raise ValueError(f"step {step} cannot train a group twice: {group_indices}")
        for group_index in group_indices:
            self._require(group_index, "take", State.GENERATED)
        for group_index in group_indices:
            self._set(group_index, State.ADMITTED)
        self.admitted[step] = list(group_indices)

    def commit(self, step: int) -> list[int]:
        """admitted(step) -> committed(step); returns the groups."""
        if step not in self.admitted:
            if self.last_committed_step is not None and step <= self.last_committed_step:
                raise ValueError(f"step {step} cannot be committed: step {self.last_committed_step} already is")
            raise ValueError(f"step {step} cannot be committed: no groups were taken for it")
        groups = self.admitted.pop(step)
        for group_index in groups:
            self._forget(group_index)
            self._committed.add(group_index)
        self.last_committed_step = max(step, -1 if self.last_committed_step is None else self.last_committed_step)
        return groups

    def in_state(self, state: State) -> list[int]:
        """Live groups in `state`, rising."""
        return sorted(index for index, is_in in self._live.items() if is_in is state)

    def count(self, state: State) -> int:
        if state is State.COMMITTED:
            return len(self._committed)
        return len(self._dropped) if state is State.DROPPED else self._counts[state]

    def counts(self) -> dict[str, int]:
        """Groups per state, and per reason as `dropped/<reason>` and `requeued/<reason>`."""
        reasons = {f"dropped/{reason}": count for reason, count in sorted(self.drop_reasons.items())}
        reasons |= {f"requeued/{reason}": count for reason, count in sorted(self.requeue_reasons.items())}
        return {state.value: self.count(state) for state in State} | reasons

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        under_way = (State.WAITING, State.RESERVED, State.GENERATED, State.ADMITTED)
        return {
            "next_group_index": self.next_group_index,
            "live": {state.value: to_ranges(self.in_state(state)) for state in under_way},
            "admitted": [[step, groups] for step, groups in sorted(self.admitted.items())],
            "committed": self._committed.to_list(),
            "dropped": self._dropped.to_list(),
            "drop_reasons": dict(self.drop_reasons),
            "requeue_reasons": dict(self.requeue_reasons),
            "last_committed_step": self.last_committed_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved account: reserved groups wait again, admitted ones are generated again.

        Raises:
            ValueError: not every group that was opened is in exactly one state.
        """
        self.__init__()
        self.next_group_index = int(state["next_group_index"])
        self.drop_reasons = Counter(state["drop_reasons"])
        self.requeue_reasons = Counter(state["requeue_reasons"])
        self.last_committed_step = state["last_committed_step"]
        if self.last_committed_step is not None and type(self.last_committed_step) is not int:
            raise ValueError(f"last_committed_step must be a number, got {self.last_committed_step!r}")
        done = [check_ranges(state["committed"]), check_ranges(state["dropped"])]
        live = {State(name): check_ranges(ranges) for name, ranges in state["live"].items()}
        _check_complete([*done, *live.values()], self.next_group_index)
        self._committed, self._dropped = RangeSet(done[0]), RangeSet(done[1])
        becomes = {State.RESERVED: State.WAITING, State.ADMITTED: State.GENERATED}
        for state_then, ranges in live.items():
            for start, stop in ranges:
                for group_index in range(start, stop):
                    self._set(group_index, becomes.get(state_then, state_then))
        self._waiting = self.in_state(State.WAITING)  # sorted, so a heap

    def live(self) -> KeysView[int]:
        """Groups that are neither committed nor dropped."""
        return self._live.keys()

    def _set(self, group_index: int, state: State) -> None:
        before = self._live.get(group_index)
        if before is not None:
            self._counts[before] -= 1
        self._live[group_index] = state
        self._counts[state] += 1

    def _wait(self, group_index: int) -> None:
        self._set(group_index, State.WAITING)
        heapq.heappush(self._waiting, group_index)

    def _forget(self, group_index: int) -> None:
        self._counts[self._live.pop(group_index)] -= 1

    def _require(self, group_index: int, action: str, *allowed: State) -> None:
        state = self.state_of(group_index)
        if state not in allowed:
            is_now = "was never reserved" if state is None else f"is {state}"
            raise ValueError(f"cannot {action} group {group_index}: it {is_now}, and must be {' or '.join(allowed)}")


def _check_complete(parts: list[list[tuple[int, int]]], num_groups: int) -> None:
    """Raise ValueError unless the ranges of all parts together cover 0 to `num_groups` once."""
    at = 0
    for start, stop in sorted(pair for part in parts for pair in part):
        if start != at:
            what = f"group {at} is in no state" if start > at else f"group {start} is in two states"
            raise ValueError(f"the saved ledger accounts for {num_groups} groups, but {what}")
        at = stop
    if at != num_groups:
        raise ValueError(f"the saved ledger accounts for {at} groups, but {num_groups} were opened")
