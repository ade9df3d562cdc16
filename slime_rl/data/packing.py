"""Samples into micro-batches: under a token cap, of equal cost, and as few as that allows.

lengths ──► fewest micro-batches by best fit (always within the cap)
        └─► spread over that many by cost, largest first; the best-fit result stands in where that breaks the cap
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence

# Hidden size at which the two terms of the cost are weighed when nobody says better.
DEFAULT_HIDDEN_SIZE = 4096


def estimate_flops(length: int, hidden_size: int = DEFAULT_HIDDEN_SIZE) -> int:
    """Cost of one sequence up to a constant factor.

    A transformer layer spends about 24 h² L on its matrices and 4 h L² on attention: 4h (6h·L + L²).
    """
    return 6 * hidden_size * length + length * length


def fixed(lengths: Sequence[int], micro_batch_size: int, *, min_batches: int = 1) -> list[list[int]]:
    """Neighbouring samples, at most `micro_batch_size` together, spread evenly over at least `min_batches`."""
    num_samples = len(lengths)
    _check_counts(num_samples, min_batches)
    if micro_batch_size < 1:
        raise ValueError(f"--micro-batch-size must be > 0, got {micro_batch_size}")
    count = max(-(-num_samples // micro_batch_size), min_batches)
    bounds = [num_samples * i // count for i in range(count + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    min_batches: int = 1,
    multiple: int = 1,
    hidden_size: int = DEFAULT_HIDDEN_SIZE,
) -> list[list[int]]:
    """Sample numbers of each micro-batch, deterministic, ordered by their first sample.

    No micro-batch holds more than `max_tokens` unless it is a single longer sample; none is empty; their number is a
    multiple of `multiple` and at least `min_batches`. Ranks with different samples agree on a number by packing once,
    taking the largest count, and packing again with `min_batches` set to it.

    Raises:
        ValueError: fewer samples than micro-batches asked for, or a length or cap that is no count.
    """
    _check_counts(len(lengths), min_batches)
    if max_tokens < 1 or multiple < 1:
        raise ValueError(f"max_tokens and multiple must be > 0, got {max_tokens} and {multiple}")
    if min(lengths) < 0:
        raise ValueError(f"a sample cannot have a negative length, got {min(lengths)}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs = [estimate_flops(n, hidden_size) for n in lengths]
    fallback = _best_fit(lengths, order, max_tokens)
    fewest = max(-(-sum(lengths) // max_tokens), min_batches)
    counts = _counts_to_try(fewest, max(len(fallback), min_batches), multiple, len(lengths))
    spread = (_spread(lengths, costs, order, max_tokens, count) for count in counts)
    batches = next((found for found in spread if found is not None), None) or _split_up(fallback, costs, counts[-1])
    return sorted(sorted(batch) for batch in batches)


def partition(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Items into `num_parts` lists of nearly equal cost whose lengths differ by at most 1 (Karmarkar-Karp, balanced).

    Largest differencing: start from tuples of `num_parts` neighbours in cost, then merge the two most uneven tuples,
    the heaviest part of one with the lightest of the other, until one is left.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), num_parts):
        items = order[start : start + num_parts]
        parts = [(costs[i], [i]) for i in items] + [(0, []) for _ in range(num_parts - len(items))]
        heap.append((parts[-1][0] - parts[0][0], start, parts))
    if not heap:
        return [[] for _ in range(num_parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, tie, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(x + y, i + j) for (x, i), (y, j) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    return [sorted(items) for _, items in heap[0][2]]


def _check_counts(num_samples: int, min_batches: int) -> None:
    if min_batches < 1:
        raise ValueError(f"min_batches must be > 0, got {min_batches}")
    if num_samples < min_batches:
        raise ValueError(f"{num_samples} samples cannot fill {min_batches} micro-batches: none may be empty")


def _counts_to_try(fewest: int, most: int, multiple: int, num_samples: int) -> list[int]:
    """Rising numbers of micro-batches from `fewest` to `most`, ever wider apart, all multiples of `multiple`."""
    first, last = (-(-count // multiple) * multiple for count in (fewest, most))
    if last > num_samples:
        raise ValueError(f"{num_samples} samples cannot fill {last} micro-batches (a multiple of {multiple})")
    counts, gap = [], multiple
    while first < last:
        counts.append(first)
        first, gap = first + gap, gap * 2
    return [*counts, last]


def _best_fit(lengths: Sequence[int], order: list[int], max_tokens: int) -> list[list[int]]:
    """Longest first into the fullest micro-batch that still has room."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, batch), sorted
    for i in order:
        at = bisect.bisect_left(room, (lengths[i], -1))
        left, batch = room.pop(at) if at < len(room) else (max_tokens, len(batches))
        if batch == len(batches):
            batches.append([])
        batches[batch].append(i)
        if left - lengths[i] >= 0:
            bisect.insort(room, (left - lengths[i], batch))
    return batches


def _spread(
    lengths: Sequence[int], costs: list[int], order: list[int], max_tokens: int, count: int
) -> list[list[int]] | None:
    """Longest first into the cheapest micro-batch so far; None when that one has no room left."""
    heap = [(0, 0, 0, batch) for batch in range(count)]  # (cost, samples, tokens, batch)
    batches: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        cost, samples, tokens, batch = heap[0]
        if samples and tokens + lengths[i] > max_tokens:
            return None
        batches[batch].append(i)
        heapq.heapreplace(heap, (cost + costs[i], samples + 1, tokens + lengths[i], batch))
    return batches


def _split_up(batches: list[list[int]], costs: list[int], count: int) -> list[list[int]]:
    """Halve the costliest micro-batches until there are `count`."""
    heap = [(-sum(costs[i] for i in batch), batch) for batch in batches if len(batch) > 1]
    done = [batch for batch in batches if len(batch) == 1]
    heapq.heapify(heap)
    while len(heap) + len(done) < count:
        _, batch = heapq.heappop(heap)
        for half in (batch[::2], batch[1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(costs[i] for i in half), half))
            else:
                done.append(half)
    return done + [batch for _, batch in heap]
