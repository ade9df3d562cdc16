"""What a trainer tells an engine's receiver (`receive.py`) to do; plain data, and the one place where both sides agree.

shared: map PATH (memory of the trainer) and load the tensors that lie in it
file:   read the safetensors file PATH and load its tensors
delta:  change the weights of version BASE by the file PATH, then load the tensors that changed
follow: connect to the trainer's socket PATH, say WORD, and follow the instructions that come from there
"""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

STRIDE = 65536  # bytes; a look at each costs a cache miss


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One message."""

    kind: Literal["shared", "file", "delta", "release", "resume", "follow"]
    path: str = ""
    word: str = ""  # follow: tells the trainer which engine it is
    num_bytes: int = 0
    checksum: int = 0  # zlib.crc32 of the file's bytes; of some of the bytes of shared memory (`spot_checksum`)
    keep: bool = False  # file: remember the tensors, a delta will follow
    version: int = 0  # what the weights are afterwards
    base: int = 0  # delta: what they must be before
    slots: tuple[tuple[str, str, tuple[int, ...], int], ...] = ()  # shared: name, dtype, shape, first byte

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def to_payload(self) -> str:
        """As SGLang's /update_weights_from_tensor takes it: a named tensor whose name is the message."""
        return base64.b64encode(pickle.dumps([(self.to_text(), torch.zeros(1))])).decode()

    @staticmethod
    def from_text(text: str) -> Instruction:
        content: dict[str, Any] = json.loads(text)
        slots = tuple((name, dtype, tuple(shape), start) for name, dtype, shape, start in content.pop("slots"))
        return Instruction(slots=slots, **content)


def spot_checksum(flat: Tensor) -> int:
    """Of the last word of each 64 KiB of `flat [B]` uint8: whether both sides look at the same bucket. The memory
    itself needs no check, and reading all of it would cost as much as copying it."""
    words = flat[: flat.numel() // STRIDE * STRIDE].view(torch.int64)[STRIDE // 8 - 1 :: STRIDE // 8]
    rest = flat[flat.numel() // STRIDE * STRIDE :].to(torch.int64)
    return (int(words.sum()) + int(rest.sum())) & 0xFFFFFFFFFFFFFFFF
