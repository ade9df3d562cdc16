"""Groups in the order of a key, with cheap leaving: what has left is passed over when it comes to the top."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import Any

# Below this, entries of groups that left are not worth a rebuild.
_SLACK = 1024


class RankedGroups:
    """A heap over group indices. A group is in it once; adding it again gives it its new key."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int]] = []  # (key, group_index, ticket)
        self._tickets: dict[int, int] = {}  # group_index -> ticket of its one entry that counts
        self._next_ticket = itertools.count()

    def add(self, group_index: int, key: Any) -> None:
        """Whatever comparing the key with others raises, the group is then not added."""
        ticket = next(self._next_ticket)
        entry = (key, group_index, ticket)
        try:
            heapq.heappush(self._heap, entry)
        except BaseException:
            self._heap = [other for other in self._heap if other is not entry]
            heapq.heapify(self._heap)
            raise
        self._tickets[group_index] = ticket

    def discard(self, group_index: int) -> None:
        """Let a group go; one that is not here is no error."""
        if self._tickets.pop(group_index, None) is not None and len(self._heap) > 2 * len(self._tickets) + _SLACK:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def first(self, count: int, skip: Collection[int] = ()) -> list[int]:
        """Up to `count` groups with the smallest keys, leaving out those in `skip`; all of them stay."""
        passed: list[tuple[Any, int, int]] = []
        found: list[int] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                passed.append(entry)
                if entry[1] not in skip:
                    found.append(entry[1])
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def pop_below(self, key: Any) -> list[int]:
        """Take out every group whose key is smaller."""
        found: list[int] = []
        while self._heap and (not self._counts(self._heap[0]) or self._heap[0][0] < key):
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                del self._tickets[entry[1]]
                found.append(entry[1])
        return found

    def __contains__(self, group_index: int) -> bool:
        return group_index in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def _counts(self, entry: tuple[Any, int, int]) -> bool:
        return self._tickets.get(entry[1]) == entry[2]
