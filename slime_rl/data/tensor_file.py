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


def problem_of(name: Any, tensor: Tensor) -> str | None:
    """Why a file cannot hold `tensor` under `name`, or None."""
    if not isinstance(name, str):
        return f"its name must be text, got {name!r}"
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"its name {name!a} has half of a surrogate pair"
    if name == "__metadata__":
        return "safetensors keeps the name '__metadata__' for itself"
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return f"it is {str(tensor.dtype).removeprefix('torch.')}; convert it to one of {known}"
    if tensor.layout is not torch.strided:
        return f"it is {str(tensor.layout).removeprefix('torch.')}; make it dense"
    return None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, tensor after tensor: the library's own writer first copies all of them in memory.

    Raises:
        ValueError: a name or dtype that the format does not have.
        OSError: the disk is full.
    """
    kinds = list(_DTYPES)
    for name, tensor in tensors.items():
        if problem := problem_of(name, tensor):
            raise ValueError(f"{path}: cannot write {name!a}: {problem}")
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
