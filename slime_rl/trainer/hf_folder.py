"""The weights of a Hugging Face folder, read and written tensor by tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_rl.config.model_folder import weight_files
from slime_rl.data.write_behind import WriteBehind

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class HFFolder:
    """The safetensors files of a folder, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, path: str | Path) -> None:
        """Open every weight file.

        Raises:
            ValueError: there is none, the index names one that is missing, or one is not whole.
        """
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in weight_files(self.path):
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: cannot be read as safetensors: {error}") from error
            self._files[file.name] = opened
            self._where.update(dict.fromkeys(opened.keys(), file.name))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def source(self, name: str) -> Any:
        """A tensor that is read when it is indexed.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self._where:
            raise ValueError(f"{self.path}: the weight {name} is missing")
        return self._files[self._where[name]].get_slice(name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        self.source(name)
        return self._files[self._where[name]].get_tensor(name)


def write_safetensors(file: Path, infos: list[TensorInfo], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which come in the order of `infos`, one at a time; the file is flushed to disk.

    Raises:
        ValueError: a tensor is not what its info says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in infos:
        start, end = end, end + info.num_bytes
        kind = _DTYPE_NAMES[info.dtype]
        header[info.name] = {"dtype": kind, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(file, "wb") as opened:
        behind = WriteBehind(opened)
        opened.write(struct.pack("<Q", len(text)) + text)
        for info, tensor in zip(infos, tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (info.dtype, info.shape):
                raise ValueError(f"{info.name} must be {info.dtype} {info.shape}, got {tensor.dtype} {tensor.shape}")
            opened.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            behind.advance()
        behind.finish()
