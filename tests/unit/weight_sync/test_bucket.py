"""Buckets keep order and size, and their bytes come back as the tensors that went in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_rl.weight_sync.bucket import Bucket, FlatBuffer, layout, split_buckets, tied_names


def plain_buffer() -> FlatBuffer:
    return FlatBuffer(lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8, device=device))


def read_back(flat: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    return {s.name: flat[s.start : s.end].view(s.dtype).reshape(s.shape) for s in layout(bucket)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 4, 4], [["0", "1"], ["2"]]),
        ([8, 1], [["0"], ["1"]]),
        ([20, 1, 1], [["0"], ["1", "2"]]),  # larger than a bucket: alone
        ([1, 20, 1], [["0"], ["1"], ["2"]]),
        ([], []),
    ],
)
def test_tensors_are_grouped_in_order_up_to_the_limit(sizes: list[int], expected: list[list[str]]) -> None:
    named = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    assert [[name for name, _ in bucket] for bucket in split_buckets(named, 8)] == expected


def test_tied_tensors_are_left_out(tmp_path: Path) -> None:
    named = [("lm_head.weight", torch.zeros(1)), ("model.norm.weight", torch.zeros(1))]
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert [[n for n, _ in b] for b in split_buckets(named, 8, tied_names(str(tmp_path)))] == [["model.norm.weight"]]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": None}))
    assert tied_names(str(tmp_path)) == frozenset()
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert tied_names(str(tmp_path)) == frozenset()


def test_only_one_tensor_is_taken_ahead() -> None:
    taken = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken
        for index in range(6):
            taken += 1
            yield str(index), torch.zeros(8, dtype=torch.uint8)

    buckets = split_buckets(tensors(), 16)
    next(buckets)
    assert taken == 3


def test_bytes_come_back_for_any_mix_of_types_and_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    bucket: Bucket = [
        ("odd_bytes", torch.arange(3, dtype=torch.uint8)),
        ("wide", torch.randn(3, 5, generator=generator)),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("narrow", torch.randn(7, generator=generator).bfloat16()),
        ("transposed", torch.randn(4, 2, generator=generator).T),
        ("parameter", torch.nn.Parameter(torch.randn(2, generator=generator))),
    ]
    flat, slots = plain_buffer().fill(bucket)
    assert flat.numel() == sum(tensor.nbytes for _, tensor in bucket)
    assert all(slot.start % slot.dtype.itemsize == 0 for slot in slots)
    for name, tensor in bucket:
        torch.testing.assert_close(read_back(flat, bucket)[name], tensor.detach(), rtol=0, atol=0)


def test_the_buffer_is_kept_while_buckets_fit() -> None:
    buffer = plain_buffer()
    large, _ = buffer.fill([("a", torch.zeros(8))])
    small, _ = buffer.fill([("a", torch.ones(2))])
    assert small.data_ptr() == large.data_ptr()
    assert small.numel() == 8
    grown, _ = buffer.fill([("a", torch.zeros(9))])
    assert grown.numel() == 36
