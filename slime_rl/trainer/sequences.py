"""The tokens of a worker's samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """N prompts with their responses, all on the CPU."""

    tokens: Tensor  # [sum L_i] int64
    offsets: Tensor  # [N + 1] int64
    prompt_lengths: list[int]  # [N]
    response_offsets: Tensor  # [N + 1] int64, into the flat response tokens

    @property
    def lengths(self) -> list[int]:
        return self.offsets.diff().tolist()

    def prompt(self, row: int) -> Tensor:
        begin = int(self.offsets[row])
        return self.tokens[begin : begin + self.prompt_lengths[row]]

    def response(self, row: int) -> Tensor:
        return self.tokens[int(self.offsets[row]) + self.prompt_lengths[row] : int(self.offsets[row + 1])]

    def response_length(self, row: int) -> int:
        return int(self.response_offsets[row + 1] - self.response_offsets[row])

    def response_index(self, row: int) -> Tensor:
        """Places of the row's response tokens among all of them, `[R]` int64."""
        return torch.arange(int(self.response_offsets[row]), int(self.response_offsets[row + 1]))
