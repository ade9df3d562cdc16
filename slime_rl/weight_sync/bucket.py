"""Weights cut into buckets, and a bucket laid out as one flat run of bytes.

(name, tensor) … ──split_buckets──► [(name, tensor), …] ≤ max_bytes ──FlatBuffer.fill──► uint8 [B] + slots
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the flat buffer: bytes [start, end)."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


def split_buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int, skip: Collection[str] = ()) -> Iterator[Bucket]:
    """Group tensors in order into buckets of at most `max_bytes`; a larger tensor is alone in its own.

    Names in `skip` are left out. The input is consumed as buckets are taken, never ahead of them.
    """
    bucket: Bucket = []
    filled = 0
    for name, tensor in named:
        if name in skip:
            continue
        if bucket and filled + tensor.nbytes > max_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def tied_names(hf_path: str) -> frozenset[str]:
    """Names that a Hugging Face checkpoint ties to others: engines have no such parameter to load."""
    content = json.loads((Path(hf_path) / "config.json").read_text())
    tied = content.get("tie_word_embeddings", (content.get("text_config") or {}).get("tie_word_embeddings", False))
    return frozenset({"lm_head.weight"}) if tied else frozenset()


def layout(bucket: Bucket) -> list[Slot]:
    """Slots one after another without gaps, widest types first, so that each starts at a multiple of its item size."""
    slots, start = [], 0
    for name, tensor in sorted(bucket, key=lambda item: -item[1].element_size()):
        end = start + tensor.nbytes
        slots.append(Slot(name, tensor.dtype, tensor.shape, start, end))
        start = end
    return slots


class FlatBuffer:
    """A flat uint8 tensor that buckets are copied into, one after the other. Grows, never shrinks."""

    def __init__(self, allocate: Callable[[int, torch.device], Tensor]) -> None:
        self._allocate = allocate
        self._bytes: Tensor | None = None

    def fill(self, bucket: Bucket) -> tuple[Tensor, list[Slot]]:
        """The bucket's bytes `[B]` uint8 on its tensors' device, and its slots; valid until the next fill."""
        slots = layout(bucket)
        num_bytes, device = slots[-1].end, bucket[0][1].device
        if self._bytes is None or self._bytes.numel() < num_bytes or self._bytes.device != device:
            self._bytes = None  # free the old one before there is a new one
            self._bytes = self._allocate(num_bytes, device)
        flat = self._bytes[:num_bytes]
        tensors = dict(bucket)
        for slot in slots:
            _copy(tensors[slot.name].detach(), flat[slot.start : slot.end])
        return flat, slots


def _copy(tensor: Tensor, target: Tensor) -> None:
    """The bytes of `tensor` into `target [nbytes]` uint8.

    On CPU by one thread: torch would use several, and those wait for each other where engines have the cores.
    """
    if tensor.is_cuda or not tensor.is_contiguous():
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    else:
        np.copyto(target.numpy(), tensor.view(-1).view(torch.uint8).numpy())
