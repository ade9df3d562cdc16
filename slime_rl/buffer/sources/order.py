"""The order of an epoch: a pure function of seed and epoch, the same in every process and on every platform."""

from __future__ import annotations

import numpy as np


def epoch_order(sizes: list[int], weights: list[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Row numbers `[M]` int64 of one epoch over files with `sizes` rows, numbered one file after the other.

    A weight is how often the epoch sees each row of its file: 2 is twice, 0.5 is half of them, other ones each time.
    """
    # RandomState is the one generator whose streams numpy has frozen; a resumed run may have another numpy.
    rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    parts, first = [], 0
    for size, weight in zip(sizes, weights, strict=True):
        rows = np.arange(first, first + size, dtype=np.int64)
        whole, rest = divmod(weighted_size(size, weight), size) if size else (0, 0)
        parts += [rows] * whole
        if rest:
            parts.append(np.sort(rng.permutation(rows)[:rest]))
        first += size
    order = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return rng.permutation(order) if shuffle else order


def weighted_size(size: int, weight: float) -> int:
    """Rows that a file contributes to an epoch: at least one, so that no file vanishes by rounding."""
    return max(round(size * weight), 1) if size else 0
