"""Against one request at a time, on a cache whose unused places hold NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime_rl.engine.cpu.batched_attention import attend, plan

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 6, 2, 16, 12


def one_by_one(
    query: Tensor, keys: list[Tensor], values: list[Tensor], num_new: list[int], scaling: float, window: int | None
) -> Tensor:
    """Softmax of the scores, request by request and token by token, in float64."""
    rows, at = [], 0
    for key, value, new in zip(keys, values, num_new, strict=True):
        for i in range(new):
            last = len(key) - new + i
            first = 0 if window is None else max(0, last - window)
            k, v = (x[first : last + 1].double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
            scores = torch.einsum("hd,khd->hk", query[at].double(), k) * scaling
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v).float())
            at += 1
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("num_new", "lengths"),
    [
        ([1] * 9, [1, 7, 8, 8, 9, 30, 31, 33, 120]),  # decoding
        ([5, 5, 9, 3, 1, 1], [5, 5, 9, 8, 20, 21]),  # whole prompts, one with a cached part, two with one new token
        ([0, 4], [6, 4]),
    ],
)
def test_blocks_give_what_single_requests_give(num_new: list[int], lengths: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    slots = torch.randperm(1000)
    cache_k = torch.full((1000, KEY_HEADS, WIDTH), float("nan"))
    cache_v = torch.full((1000, KEY_HEADS, VALUE_WIDTH), float("nan"))
    places = torch.full((len(lengths), max(lengths)), 999, dtype=torch.int32)  # beyond the end: left from before
    keys, values = [], []
    for row, length in enumerate(lengths):
        own, slots = slots[:length], slots[length:]
        places[row, :length] = own.int()
        cache_k[own], cache_v[own] = torch.randn(length, KEY_HEADS, WIDTH), torch.randn(length, KEY_HEADS, VALUE_WIDTH)
        keys.append(cache_k[own])
        values.append(cache_v[own])
    query = torch.randn(sum(num_new), HEADS, WIDTH)
    output = torch.full((sum(num_new), HEADS, VALUE_WIDTH), float("nan"))
    starts = [sum(num_new[:i]) for i in range(len(num_new))]
    for block in plan(starts, num_new, lengths, places):
        attend(query, output, cache_k, cache_v, block, 0.3, window)
    assert (output - one_by_one(query, keys, values, num_new, 0.3, window)).abs().max() < 1e-5


def test_padding_stays_within_a_quarter() -> None:
    lengths = [50, 55, 60, 2000, 2100, 8]
    blocks = plan(list(range(6)), [1] * 6, lengths, torch.zeros(6, 2100, dtype=torch.int32))
    assert sum(len(block.lengths) for block in blocks) == 6
    assert all(int(block.lengths.max()) <= 1.25 * int(block.lengths.min()) for block in blocks)
