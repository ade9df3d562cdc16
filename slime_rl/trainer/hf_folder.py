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

from slime_rl.config.model_folder import weight_places
from slime_rl.config.quantization import SCALE, Fp8Blocks, quantized_weights, read_quantization
from slime_rl.data.fp8 import dequantize_blocks
from slime_rl.data.write_behind import WriteBehind

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


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
    """The safetensors files of a folder, memory-mapped: nothing is read before it is asked for.

    Weights that the folder holds as fp8 are dequantised when they are read, and are of type `dtype` then.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Open every weight file.

        Raises:
            ValueError: there is none, one is not whole, the index does not say what is there, or the weights are stored
                in a form that is not known.
        """
        self.path, self.dtype = Path(path), dtype
        self._blocks = read_quantization(path)
        self._quantized = frozenset(quantized_weights(path))
        self._files: dict[Path, Any] = {}
        self._where = weight_places(self.path)
        for file in dict.fromkeys(self._where.values()):
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: cannot be read as safetensors: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> list[str]:
        """Of the weights; an fp8 weight's scales are part of it."""
        scales = {name + SCALE for name in self._quantized}
        return [name for name in self._where if name not in scales]

    def source(self, name: str) -> Any:
        """A tensor that is read when it is indexed.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self._where:
            raise ValueError(f"{self.path}: the weight {name} is missing")
        stored = self._files[self._where[name]].get_slice(name)
        if name not in self._quantized:
            return stored
        assert self._blocks is not None
        scale = self._files[self._where[name + SCALE]].get_tensor(name + SCALE)
        return _Dequantized(stored, scale, self._blocks, self.dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a tensor that is read.

        Raises:
            ValueError: there is no such tensor, or torch has no such type.
        """
        source = self.source(name)
        if isinstance(source, _Dequantized):
            return source.dtype
        kind = source.get_dtype()
        if kind not in _DTYPES:
            raise ValueError(f"{self._where[name]}: {name} is of type {kind}, which is not known here")
        return _DTYPES[kind]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        source = self.source(name)
        return source[:] if name in self._quantized else self._files[self._where[name]].get_tensor(name)


@dataclass(frozen=True)
class _Dequantized:
    """An fp8 weight `[o, i]` that is read, and multiplied by its scales, when it is indexed by slices."""

    stored: Any
    scale_inv: Tensor
    blocks: Fp8Blocks
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        slices = index if isinstance(index, tuple) else (index, slice(None))
        (top, _, _), (left, _, _) = (s.indices(n) for s, n in zip(slices, self.get_shape(), strict=True))
        rows, columns = self.blocks.rows, self.blocks.columns
        return dequantize_blocks(self.stored[index], self.scale_inv, rows, columns, at=(top, left), dtype=self.dtype)


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
    with open(file, "wb") as opened, WriteBehind(opened) as behind:
        opened.write(struct.pack("<Q", len(text)) + text)
        for info, tensor in zip(infos, tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (info.dtype, info.shape):
                raise ValueError(f"{info.name} must be {info.dtype} {info.shape}, got {tensor.dtype} {tensor.shape}")
            opened.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            behind.advance()
        behind.finish()
