from __future__ import annotations

import struct

import torch

from slime_rl.engine.cpu.seeded_sampling import murmur_hash32

MASK = 0xFFFFFFFF


def reference(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32 as published by Austin Appleby, for whole blocks."""
    h = seed
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_the_reference_gives_the_published_values() -> None:
    assert reference(b"", 1) == 0x514E28B7
    assert reference(b"aaaa", 0x9747B28C) == 0x5A97808A
    assert reference(b"\x21\x43\x65\x87", 0) == 0xF55B516B


def test_the_hash_is_murmur3_of_seed_position_and_column() -> None:
    seeds, positions, columns = [0, 7, 2**31 - 1, 2**40 + 5], [0, 3, 9, 100_000], [0, 1, 95, 150_000]
    for dtype in (torch.int64, torch.uint64):
        hashed = murmur_hash32(torch.tensor(seeds, dtype=dtype), torch.tensor(positions), torch.tensor(columns))
        rows = zip(seeds, positions, strict=True)
        wanted = [[reference(struct.pack("<QII", seed, at, c), 0) for c in columns] for seed, at in rows]
        assert hashed.tolist() == wanted
