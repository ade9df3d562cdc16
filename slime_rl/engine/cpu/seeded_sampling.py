"""Makes SGLang on CPU honour the `sampling_seed` of a request.

It hands seeds to its sampler only with --enable-deterministic-inference, which refuses the CPU's attention, and draws
its noise with a hash that exists as a CUDA kernel or compiled for CPU. Both are put right here; its sampler does the
rest.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


class _Seeded:
    """SGLang's execution settings, but for the one that lets seeds through."""

    deterministic = SimpleNamespace(enable_deterministic_inference=True)

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


def install() -> None:
    """After sglang's scheduler is imported, before it starts."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling import sampling_batch_info

    batch_info: Any = sampling_batch_info.SamplingBatchInfo
    original = batch_info.from_schedule_batch.__func__
    names = {**original.__globals__, "get_exec": lambda: _Seeded(sampling_batch_info.get_exec())}
    seeded = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    batch_info.from_schedule_batch = classmethod(seeded)
    sampler.murmur_hash32 = murmur_hash32


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit) of seed `[n]` (64 bit), position `[n]` and column `[m]` (32 bit) -> `[n, m]` int64."""
    wide = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(wide)
    for block in (wide & _LOW, (wide >> 32) & _LOW, positions.to(torch.int64) & _LOW):
        state = _mix(state, block)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & _LOW) ^ 16  # 16 bytes long
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _LOW
    return state ^ (state >> 16)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    """Take one 32-bit block into the hash. Products wrap at 64 bits, which leaves their low 32 as they are."""
    block = (_rotate((block * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotate(x: Tensor, bits: int) -> Tensor:
    """A 32-bit number rotated to the left."""
    return ((x << bits) | (x >> (32 - bits))) & _LOW
