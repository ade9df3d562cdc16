"""What a dataset is, so that a checkpoint of another one is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_rl.buffer.sources.spec import DataFile

_BLOCK = 1 << 20
# Files up to this many blocks are hashed whole, larger ones at evenly spaced blocks: start stays quick.
_MAX_BLOCKS = 256


def fingerprint(files: Sequence[DataFile]) -> list[dict[str, Any]]:
    """Name (without its folder, so that data may move), size, content hash, slice and weight of each file."""
    return [
        {
            "name": Path(file.path).name,
            "bytes": Path(file.path).stat().st_size,
            "hash": content_hash(file.path),
            "rows": [file.start, file.stop],
            "weight": file.weight,
        }
        for file in files
    ]


def content_hash(path: str) -> str:
    size = Path(path).stat().st_size
    num_blocks = -(-size // _BLOCK)
    chosen = range(num_blocks) if num_blocks <= _MAX_BLOCKS else _spaced(num_blocks)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(path, "rb") as file:
        for block in chosen:
            file.seek(block * _BLOCK)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _spaced(num_blocks: int) -> list[int]:
    return [i * (num_blocks - 1) // (_MAX_BLOCKS - 1) for i in range(_MAX_BLOCKS)]


def describe(prints: Sequence[dict[str, Any]]) -> str:
    """A fingerprint in words."""
    words = []
    for entry in prints:
        start, stop = entry["rows"]
        bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
        rows = "" if bounds == ":" else f"@[{bounds}]"
        weight = "" if entry["weight"] == 1 else f"@{entry['weight']:g}"
        words.append(f"{entry['name']}{rows}{weight} ({entry['bytes']} bytes, hash {entry['hash'][:8]})")
    return ", ".join(words)
