"""Tensors as numpy views and back, so that pickling hands their memory over instead of copying it.

numpy pickles through protocol 5's out-of-band buffers, which Ray's object store maps into every reader. A tensor that
arrives that way shares the store's memory: clone it before writing to it in place.
"""

from __future__ import annotations

import struct
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

# numpy has no bfloat16 and no float8: their bits travel as integers of the same width.
_AS_BITS = {1: torch.uint8, 2: torch.int16}


def layout_problem(tensor: Tensor) -> str | None:
    """Why rows cannot be taken out of `tensor`, or None: it is sparse, nested or quantized."""
    if tensor.layout is not torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}; make it dense"
    if tensor.is_nested:
        return "is a nested tensor; make it a Ragged"
    return "is quantized; dequantize it" if tensor.is_quantized else None


def tensor_to_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """A numpy view of a tensor (copied to the CPU when it lives elsewhere) and the name of its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16 or name.startswith("float8"):
        tensor = tensor.view(_AS_BITS[tensor.element_size()])
    return tensor.numpy(), name


def array_to_tensor(array: np.ndarray, dtype_name: str) -> Tensor:
    """The tensor that `tensor_to_array` described, on the array's own memory."""
    with warnings.catch_warnings():
        # A buffer of the object store is read-only; torch warns about it at every tensor.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        tensor = torch.from_numpy(array)
    dtype: Any = getattr(torch, dtype_name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def tensors_equal(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def to_row_index(item: Any, num_rows: int) -> slice | Tensor:
    """A slice, list, numpy array, tensor or boolean mask as a forward slice or int64 row numbers `[M]`.

    Raises:
        ValueError: a mask whose length is not `num_rows`, or something that is no index.
        IndexError: a row that does not exist.
    """
    if isinstance(item, slice):
        return _slice_index(item, num_rows)
    index = _as_index(item)
    if index.ndim != 1:
        raise ValueError(f"an index of rows must have one dimension, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise ValueError(f"a mask must have one entry per row: got {len(index)} entries for {num_rows} rows")
        return index.nonzero().squeeze(1)
    if len(index) and (index.is_floating_point() or index.is_complex()):
        raise ValueError(f"an index of rows must be integers or booleans, got {index.dtype}")
    index = index.to(torch.int64)
    if len(index) and (int(index.min()) < -num_rows or int(index.max()) >= num_rows):
        raise IndexError(f"row {int(index.max() if int(index.max()) >= num_rows else index.min())} of {num_rows} rows")
    return torch.where(index < 0, index + num_rows, index)


def _slice_index(item: slice, num_rows: int) -> slice | Tensor:
    try:
        start, stop, step = item.indices(num_rows)
    except TypeError as error:
        raise ValueError(f"a slice of rows has whole numbers, got {item}") from error
    if step == 1:
        return slice(start, max(start, stop))
    return torch.arange(num_rows)[torch.tensor(list(range(start, stop, step)), dtype=torch.int64)]


def _as_index(item: Any) -> Tensor:
    """Row numbers or a mask, as they were given."""
    if isinstance(item, Tensor):
        return item.cpu()
    if isinstance(item, np.ndarray):
        if item.dtype.kind not in "biufc":
            raise ValueError(f"an index of rows must be integers or booleans, got {item.dtype}")
        return torch.as_tensor(item)
    if not isinstance(item, list | tuple | range):
        raise ValueError(f"rows are chosen by int, slice, list, array, tensor or mask, got {type(item).__name__}")
    numbers = list(item)
    if set(map(type, numbers)) <= {int}:  # nearly always; a look at each takes ten times as long
        return torch.tensor(numbers, dtype=torch.int64)
    bools = [isinstance(x, bool | np.bool_) for x in numbers]
    if all(bools):
        return torch.tensor([bool(x) for x in numbers])
    if any(bools):
        raise ValueError("an index of rows must be integers or booleans, got both in one list")
    if odd := [x for x in numbers if not is_whole(x)]:
        raise ValueError(f"an index of rows must be integers or booleans, got {type(odd[0]).__name__} {odd[0]!r:.40}")
    return torch.tensor([int(x) for x in numbers], dtype=torch.int64)


def is_whole(value: Any) -> bool:
    """Whether it is an integer of Python, numpy or torch; a bool is none."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_STRUCT_CODES = {np.dtype(code): code for code in ("b", "i", "q", "f", "d")}  # numpy's letters are the same


def row_to_array(row: Any, dtype: np.dtype | None) -> np.ndarray:
    """What `np.asarray(row, dtype)` gives, in a third of the time for the lists that samples hold.

    Masks and versions are mostly one number over and over, and `struct` converts a list faster than numpy does.
    """
    code = None if dtype is None else _STRUCT_CODES.get(dtype)
    if dtype is None or code is None or type(row) is not list or not row or type(row[0]) not in (int, float):
        return np.asarray(row, dtype=dtype)
    if dtype.kind == "i" and row.count(row[0]) == len(row):
        return np.full(len(row), row[0], dtype=dtype)
    try:
        return np.frombuffer(struct.pack(f"={len(row)}{code}", *row), dtype=dtype)
    except (struct.error, OverflowError, TypeError):
        return np.asarray(row, dtype=dtype)  # for its own result or error
