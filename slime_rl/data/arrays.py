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


def tensor_to_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """A numpy view of a tensor (copied to the CPU when it lives elsewhere) and the name of its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu().contiguous()
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
        start, stop, step = item.indices(num_rows)
        if step == 1:
            return slice(start, max(start, stop))
        return torch.arange(num_rows)[torch.tensor(list(range(start, stop, step)), dtype=torch.int64)]
    if isinstance(item, range):
        item = list(item)
    if isinstance(item, list | tuple):
        is_mask = len(item) > 0 and all(isinstance(x, bool | np.bool_) for x in item)
        index = torch.tensor([bool(x) for x in item] if is_mask else [int(x) for x in item])
        index = index if is_mask else index.to(torch.int64)
    elif isinstance(item, np.ndarray | Tensor):
        index = torch.as_tensor(item).cpu()
    else:
        raise ValueError(f"rows are chosen by int, slice, list, array, tensor or mask, got {type(item).__name__}")
    if index.ndim != 1:
        raise ValueError(f"an index of rows must have one dimension, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise ValueError(f"a mask must have one entry per row: got {len(index)} entries for {num_rows} rows")
        return index.nonzero().squeeze(1)
    if index.is_floating_point():
        raise ValueError(f"an index of rows must be integers or booleans, got {index.dtype}")
    index = index.to(torch.int64)
    if len(index) and (int(index.min()) < -num_rows or int(index.max()) >= num_rows):
        raise IndexError(f"row {int(index.max() if int(index.max()) >= num_rows else index.min())} of {num_rows} rows")
    return torch.where(index < 0, index + num_rows, index)


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
