"""A set of integers as sorted, disjoint, half-open ranges: what a run has behind it, in a few numbers."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any


def to_ranges(rising: list[int]) -> list[list[int]]:
    """Half-open ranges of rising, different integers."""
    cuts = [i for i in range(1, len(rising)) if rising[i] != rising[i - 1] + 1]
    bounds = [0, *cuts, len(rising)] if rising else [0]
    return [[rising[start], rising[stop - 1] + 1] for start, stop in itertools.pairwise(bounds)]


def check_ranges(ranges: Any) -> list[tuple[int, int]]:
    """Half-open ranges that were read from somewhere, as pairs.

    Raises:
        ValueError: they are not rising, disjoint ranges of whole numbers.
    """
    pairs = [tuple(pair) for pair in ranges]
    bounds = [bound for pair in pairs for bound in pair]
    if not all(type(bound) is int for bound in bounds) or any(len(pair) != 2 for pair in pairs):
        raise ValueError("ranges are pairs of whole numbers")
    starts, stops = bounds[::2], bounds[1::2]
    falls = any(start >= stop for start, stop in zip(starts, stops, strict=True))
    if falls or any(start < stop for stop, start in zip(stops, starts[1:], strict=False)):
        raise ValueError("ranges must rise and not overlap")
    return [(start, stop) for start, stop in zip(starts, stops, strict=True)]


class RangeSet:
    """Grows by single integers; neighbours melt together."""

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        pairs = [tuple(pair) for pair in ranges]
        self._starts = [start for start, _ in pairs]
        self._stops = [stop for _, stop in pairs]
        self._size = sum(stop - start for start, stop in pairs)

    def add(self, value: int) -> None:
        """Add `value`, which must not be in the set."""
        at = bisect_right(self._starts, value)
        if at and value < self._stops[at - 1]:
            raise ValueError(f"{value} is already in the set")
        joins_left = at > 0 and self._stops[at - 1] == value
        joins_right = at < len(self._starts) and self._starts[at] == value + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_left:
            self._stops[at - 1] = value + 1
        elif joins_right:
            self._starts[at] = value
        else:
            self._starts.insert(at, value)
            self._stops.insert(at, value + 1)
        self._size += 1

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value)
        return at > 0 and value < self._stops[at - 1]

    def __len__(self) -> int:
        return self._size

    def to_list(self) -> list[list[int]]:
        return [[start, stop] for start, stop in zip(self._starts, self._stops, strict=True)]
