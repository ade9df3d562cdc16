"""DAPO's soft overlong penalty and filter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slime_rl.algorithms.overlong import overlong_filter, overlong_penalty
from slime_rl.config import Config

Make = Callable[..., Config]
LENGTHS = torch.tensor([0, 5, 6, 7, 9, 10, 12])  # --max-response-len is 10


def test_penalty_grows_over_the_buffer(algo: Make) -> None:
    penalty = overlong_penalty(algo(overlong_buffer_len=4, overlong_penalty=0.5), LENGTHS)
    assert penalty.tolist() == pytest.approx([0, 0, 0, -0.125, -0.375, -0.5, -0.5])
    assert overlong_penalty(algo(), LENGTHS).tolist() == [0.0] * 7


def test_filter_masks_truncated_samples_only_when_asked(algo: Make) -> None:
    mask, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    truncated = torch.tensor([False, True])
    assert overlong_filter(algo(overlong_filter=True), mask, ids, truncated).tolist() == [1, 0, 0, 0]
    assert torch.equal(overlong_filter(algo(), mask, ids, truncated), mask)
