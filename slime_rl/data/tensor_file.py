"""Tensors by name in a safetensors file: written one after the other, read by mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# The format's names of dtypes, widest first: written in this order every tensor begins at a multiple of its item size.
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int16: "I16",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, tensor after tensor: the library's own writer first copies all of them in memory.

    Raises:
        ValueError: a dtype that the format has no name for.
        OSError: the disk is full.
    """
    kinds = list(_DTYPES)
    if unknown := [f"{name} ({t.dtype})" for name, t in tensors.items() if t.dtype not in _DTYPES]:
        raise ValueError(f"{path}: cannot write {unknown[0]}")
    names = sorted(tensors, key=lambda name: kinds.index(tensors[name].dtype))
    header: dict[str, Any] = {}
    at = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            if len(flat):
                file.write(flat.view(torch.uint8).numpy().data)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, mapped rather than read."""
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
