"""The tokens of a worker's samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """N prompts with their responses, all on the CPU."""

    tokens: Tensor  # [sum L_i] int64
    offsets: Tensor  # [N + 1] int64
    prompt_lengths: list[int]  # [N]
    response_offsets: Tensor  # [N + 1] int64, into the flat response tokens

    # As Python's numbers: packing asks for those of every row, and a tensor of one number costs microseconds.
    @cached_property
    def lengths(self) -> list[int]:
        return self.offsets.diff().tolist()

    @cached_property
    def starts(self) -> list[int]:
        return self.offsets.tolist()

    @cached_property
    def response_starts(self) -> list[int]:
        return self.response_offsets.tolist()

    @cached_property
    def prompt_keys(self) -> list[bytes]:
        """`[N]`, equal where prompts are."""
        tokens = self.tokens.numpy()
        firsts = zip(self.starts, self.prompt_lengths, strict=False)
        return [tokens[first : first + length].tobytes() for first, length in firsts]

    def prompt(self, row: int) -> Tensor:
        return self.tokens[self.starts[row] : self.starts[row] + self.prompt_lengths[row]]

    def response(self, row: int) -> Tensor:
        return self.tokens[self.starts[row] + self.prompt_lengths[row] : self.starts[row + 1]]

    def response_length(self, row: int) -> int:
        return self.response_starts[row + 1] - self.response_starts[row]

    def response_index(self, rows: list[int]) -> Tensor:
        """Places of the rows' response tokens among all of them, `[T]` int64."""
        lengths = [self.response_length(row) for row in rows]
        return torch.from_numpy(ranges([self.response_starts[row] for row in rows], lengths))


def ranges(starts: Any, lengths: Any) -> np.ndarray:
    """`start, start + 1, …` of every length in turn, `[sum of lengths]` int64."""
    counts = np.asarray(lengths, dtype=np.int64)
    before = counts.cumsum() - counts
    return np.arange(counts.sum()) + np.repeat(np.asarray(starts, dtype=np.int64) - before, counts)
