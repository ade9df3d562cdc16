"""Rows of different lengths without padding: all values one after the other, and where each row begins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_rl.data.arrays import (
    array_to_tensor,
    is_whole,
    layout_problem,
    row_to_array,
    tensor_to_array,
    tensors_equal,
    to_row_index,
)


@dataclass(frozen=True, eq=False)
class Ragged:
    """N rows; row i is `values[offsets[i]:offsets[i + 1]]`.

    Invariant: `offsets` starts at 0, never falls and ends at `len(values)`. Slices and single rows are views.
    """

    values: Tensor  # [sum n_i, ...] any dtype
    offsets: Tensor  # [N + 1] int64

    def __post_init__(self) -> None:
        for name, part in (("values", self.values), ("offsets", self.offsets)):
            if not isinstance(part, Tensor) or (problem := layout_problem(part)) or part.ndim == 0:
                what = type(part).__name__ if not isinstance(part, Tensor) else problem or "a scalar"
                raise ValueError(f"{name} of a Ragged must be a dense Tensor with rows, got {what}")
        offsets, total = self.offsets, len(self.values)
        if offsets.ndim != 1 or offsets.dtype != torch.int64 or len(offsets) == 0:
            raise ValueError(f"offsets must be int64 [N + 1], got {offsets.dtype} {tuple(offsets.shape)}")
        if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(f"offsets must rise from 0 to len(values) = {total}, got {offsets.tolist()[:8]}…")

    @classmethod
    def from_list(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Rows given as tensors, arrays or lists of numbers; without rows there must be a `dtype`."""
        if rows and isinstance(rows[0], Tensor):
            _check_alike(rows)
            return cls.from_lengths(torch.cat(list(rows)).to(dtype or rows[0].dtype), [len(r) for r in rows])
        if dtype is None and not rows:
            raise ValueError("Ragged.from_list needs a dtype when there are no rows")
        kind = None if dtype is None else tensor_to_array(torch.empty(0, dtype=dtype))[0].dtype
        if dtype is not None and str(kind) != str(dtype).removeprefix("torch."):
            kind = np.dtype(np.float32)  # no numpy twin (bfloat16): converted below
        try:
            arrays = [row_to_array(row, kind) for row in rows]
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"Ragged.from_list: a row is no numbers of {dtype or 'one kind'}: {error}") from error
        _check_alike(arrays)
        values = torch.from_numpy(np.concatenate(arrays) if arrays else np.empty(0, dtype=kind))
        return cls.from_lengths(values if dtype is None else values.to(dtype), [len(a) for a in arrays])

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """`values [sum n_i, ...]` cut into rows of `lengths [N]`."""
        try:
            counts = torch.as_tensor(lengths).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"lengths must be whole numbers [N], got {lengths!r:.80}: {error}") from error
        is_float = counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool
        if counts.ndim != 1 or (is_float and len(counts)):
            raise ValueError(f"lengths must be whole numbers [N], got {counts.dtype} {tuple(counts.shape)}")
        lengths = counts.to(torch.int64)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order. They must agree in dtype and trailing shape."""
        if not parts:
            raise ValueError("Ragged.concat needs at least one part")
        if odd := [type(part).__name__ for part in parts if not isinstance(part, Ragged)]:
            raise ValueError(f"Ragged.concat joins Ragged fields, got {odd[0]}")
        if len(kinds := {(part.dtype, tuple(part.values.shape[1:])) for part in parts}) > 1:
            raise ValueError(f"Ragged.concat: dtypes and trailing shapes differ: {sorted(map(str, kinds))}")
        return cls.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    @property
    def lengths(self) -> Tensor:  # [N] int64
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, item: Any) -> Any:
        """An int gives that row as a tensor view; a slice, list, array, tensor or mask gives a Ragged."""
        if is_whole(item):
            row = int(item) + (len(self) if item < 0 else 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {item} of {len(self)} rows")
            return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]
        return self.select(to_row_index(item, len(self)))

    def select(self, rows: slice | Sequence[int] | Tensor) -> Ragged:
        """The given rows in the given order; a slice shares memory."""
        index = to_row_index(rows, len(self))
        if isinstance(index, slice):
            offsets = self.offsets[index.start : index.stop + 1]
            return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        starts, stops = self.offsets[:-1][index].tolist(), self.offsets[1:][index].tolist()
        views = [self.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return Ragged.from_lengths(torch.cat(views) if views else self.values[:0], self.lengths[index])

    def rows(self) -> list[Tensor]:
        """Every row as a view."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_list(self) -> list[list[Any]]:
        """Every row as a Python list."""
        bounds = list(itertools.pairwise(self.offsets.tolist()))
        values, name = tensor_to_array(self.values)
        if str(values.dtype) != name:  # no numpy twin
            return [self.values[start:stop].tolist() for start, stop in bounds]
        if values.ndim != 1 or values.dtype.kind == "f" or len(values) == 0:
            return [values[start:stop].tolist() for start, stop in bounds]
        # Masks and versions mostly are one number over and over, which a list repeats much faster than it is filled.
        changes = np.flatnonzero(values[1:] != values[:-1]) + 1
        starts, stops = self.offsets[:-1].numpy(), self.offsets[1:].numpy()
        is_constant = np.searchsorted(changes, starts + 1) == np.searchsorted(changes, stops)
        return [
            [values[start].item()] * (stop - start) if same and start < stop else values[start:stop].tolist()
            for (start, stop), same in zip(bounds, is_constant.tolist(), strict=True)
        ]

    def to(self, device: torch.device | str) -> Ragged:
        """Values on `device`; the offsets stay on the CPU, where rows are counted."""
        return Ragged(self.values.to(device), self.offsets)

    def to_padded(self, pad: float | int | bool = 0) -> Tensor:
        """`[N, max n_i, ...]`, short rows filled with `pad` at the end."""
        try:
            fills = self.values.new_full((), pad)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"to_padded: {self.dtype} cannot hold the padding {pad!r}: {error}") from error
        if not (self.values.is_floating_point() or self.values.is_complex()) and fills.item() != pad:
            raise ValueError(f"to_padded: {self.dtype} cannot hold the padding {pad!r}, which would be {fills.item()}")
        lengths = self.lengths
        width = int(lengths.max()) if len(self) else 0
        padded = self.values.new_full((len(self), width, *self.values.shape[1:]), pad)
        padded[(torch.arange(width) < lengths[:, None]).to(self.device)] = self.values
        return padded

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return torch.equal(self.offsets, other.offsets) and tensors_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shape = "".join(f", {d}" for d in self.values.shape[1:])
        return f"Ragged([{len(self)} rows, {len(self.values)} values{shape}], {self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (*tensor_to_array(self.values), tensor_to_array(self.offsets)[0])


def _check_alike(rows: Sequence[Any]) -> None:
    """Raises ValueError unless these are tensors, or arrays, that can stand one after the other."""
    for number, row in enumerate(rows):
        if not isinstance(row, type(rows[0])):
            kinds = f"row 0 is a {type(rows[0]).__name__}, row {number} a {type(row).__name__}"
            raise ValueError(f"Ragged.from_list: rows are all tensors or none is: {kinds}")
        if row.ndim == 0 or row.shape[1:] != rows[0].shape[1:]:
            shapes = f"{tuple(rows[0].shape)} and row {number} of {tuple(row.shape)}"
            raise ValueError(f"Ragged.from_list: rows differ in their first dimension only, got row 0 of {shapes}")
        if isinstance(row, np.ndarray) and row.dtype.kind not in "biufc":
            raise ValueError(f"Ragged.from_list: row {number} is no list of numbers, but of {row.dtype}")


def _rebuild(values: np.ndarray, dtype_name: str, offsets: np.ndarray) -> Ragged:
    return Ragged(array_to_tensor(values, dtype_name), array_to_tensor(offsets, "int64"))
