"""The operations of a DataProto that move rows about: cut, join, reorder, repeat, pad, fold, iterate."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from slime_rl.data.arrays import is_whole, tensors_equal, to_row_index
from slime_rl.data.ragged import Ragged

Field = Tensor | Ragged | np.ndarray


class Rearrange:
    """Row operations in terms of four things that DataProto provides."""

    tensors: dict[str, Tensor | Ragged]
    non_tensors: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select_rows(self, rows: Any) -> Self: ...

    def chunk(self, chunks: int, auto_padding: bool = False) -> list[Self]:
        """`chunks` pieces of equal length.

        With `auto_padding` rows are repeated from the front to make that possible; their number is
        `meta_info["pad_size"]` of every piece, for `unpad` after the pieces came back together.

        Raises:
            ValueError: the rows do not divide and `auto_padding` is off.
        """
        chunks = _check_count("chunk: the number of chunks", chunks, 1)
        whole = self
        if auto_padding:
            whole, pad_size = self.pad_to_divisor(chunks)
            whole = whole.with_meta({**self.meta_info, "pad_size": pad_size})
        if len(whole) % chunks:
            raise ValueError(f"chunk: {len(whole)} rows do not divide into {chunks} equal chunks")
        size = len(whole) // chunks
        return [whole.select_rows(slice(i * size, (i + 1) * size)) for i in range(chunks)]

    def split(self, rows_per_piece: int) -> list[Self]:
        """Pieces of `rows_per_piece` rows; the last one may be shorter. No rows are one empty piece, for `concat`."""
        rows_per_piece = _check_count("split: rows per piece", rows_per_piece, 1)
        starts = range(0, max(len(self), 1), rows_per_piece)
        return [self.select_rows(slice(at, at + rows_per_piece)) for at in starts]

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """The rows of all parts in order.

        `meta_info["metrics"]` of the parts becomes a dict of lists; every other meta key that several parts have must
        be equal in them. All parts must have the same fields.
        """
        if not isinstance(parts, Iterable):
            raise ValueError(f"concat joins a list of batches, got {type(parts).__name__}")
        parts = list(parts)
        if not parts:
            raise ValueError("concat needs at least one part")
        if odd := [type(part).__name__ for part in parts if not isinstance(part, Rearrange)]:
            raise ValueError(f"concat joins batches, got {odd[0]}")
        for what in ("tensors", "non_tensors"):
            have = [set(getattr(part, what)) for part in parts]
            if odd := sorted(set.union(*have) - set.intersection(*have), key=str):
                raise ValueError(f"concat: {what} {odd} are not in every part")
        tensors = {key: _concat_field(key, [part.tensors[key] for part in parts]) for key in parts[0].tensors}
        arrays = {key: _concat_arrays(key, [part.non_tensors[key] for part in parts]) for key in parts[0].non_tensors}
        return parts[0].rebuild(tensors, arrays, _concat_meta([part.meta_info for part in parts]))

    def reorder(self, order: Any) -> None:
        """Put the rows into `order` (a permutation), in place."""
        rows = torch.arange(len(self))
        try:
            index = to_row_index(order, len(self))
            index = rows[index] if isinstance(index, slice) else index
        except IndexError:
            index = rows[:0]  # names a row that is not there
            is_permutation = False
        else:
            is_permutation = torch.equal(index.sort().values, rows)
        if not is_permutation:
            raise ValueError(f"reorder: the order must name each of the {len(self)} rows once, got {order!r:.200}")
        moved = self.select_rows(index)
        self.tensors, self.non_tensors = moved.tensors, moved.non_tensors

    def repeat(self, times: int, interleave: bool = True) -> Self:
        """Every row `times` times: next to each other (`interleave`), or the whole batch again and again."""
        times = _check_count("repeat: times", times, 0)
        rows = torch.arange(len(self))
        return self.select_rows(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    def repeat_each(self, times: Sequence[int] | Tensor) -> Self:
        """Row i `times[i]` times, next to each other."""
        counts = times.tolist() if isinstance(times, Tensor | np.ndarray) else times
        if not isinstance(counts, Sequence) or len(counts) != len(self):
            got = len(counts) if isinstance(counts, Sequence) else repr(times)
            raise ValueError(f"repeat_each needs one count per row: got {got} for {len(self)} rows")
        for row, count in enumerate(counts):
            _check_count(f"repeat_each: the count of row {row}", count, 0)
        numbers = torch.tensor([int(count) for count in counts], dtype=torch.int64)
        return self.select_rows(torch.arange(len(self)).repeat_interleave(numbers))

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """(rows padded to a multiple of `divisor` by cycling through them from the front, number of rows added).

        No rows are a multiple of any number already, and stay none.
        """
        divisor = _check_count("pad_to_divisor: the divisor", divisor, 1)
        pad_size = -len(self) % divisor
        if pad_size == 0:
            return self.select_rows(slice(None)), 0
        return self.select_rows(torch.arange(len(self) + pad_size) % len(self)), pad_size

    def unpad(self, pad_size: int) -> Self:
        """Without the last `pad_size` rows."""
        pad_size = _check_count("unpad: the number of rows", pad_size, 0)
        if pad_size > len(self):
            raise ValueError(f"unpad: cannot take {pad_size} rows off {len(self)}")
        return self.select_rows(slice(0, len(self) - pad_size))

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """Dense fields `[N, ...]` as `[new_batch_size, N / new_batch_size, ...]`. Ragged fields cannot be folded."""
        new_batch_size = _check_count("fold_batch_dim: the new batch size", new_batch_size, 1)
        if len(self) % new_batch_size:
            raise ValueError(f"fold_batch_dim: {len(self)} rows do not fold into {new_batch_size}")
        inner = len(self) // new_batch_size
        return self._reshape("fold_batch_dim", lambda x: x.reshape(new_batch_size, inner, *x.shape[1:]))

    def unfold_batch_dim(self, batch_dims: int = 2) -> Self:
        """The inverse: the first `batch_dims` dimensions of every field as one."""
        batch_dims = _check_count("unfold_batch_dim: the number of dimensions", batch_dims, 1)
        for key, value in [*self.tensors.items(), *self.non_tensors.items()]:
            if not isinstance(value, Ragged) and value.ndim < batch_dims:
                shape = tuple(value.shape)
                raise ValueError(f"unfold_batch_dim: {key!r} must have {batch_dims} dimensions or more, got {shape}")
        return self._reshape(
            "unfold_batch_dim", lambda x: x.reshape(math.prod(x.shape[:batch_dims]), *x.shape[batch_dims:])
        )

    def unfold_column_chunks(self, num_chunks: int, split_keys: Sequence[str]) -> Self:
        """Dense `split_keys` `[N, C, ...]` as `[N * num_chunks, C / num_chunks, ...]`; other rows are repeated."""
        num_chunks = _check_count("unfold_column_chunks: the number of chunks", num_chunks, 1)
        if isinstance(split_keys, str):
            raise ValueError(f"unfold_column_chunks: needs a list of names, got {split_keys!r}")
        repeated = self.repeat(num_chunks)
        tensors = dict(repeated.tensors)
        for key in split_keys:
            value = self.tensors.get(key)
            if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] % num_chunks:
                shape = tuple(value.shape) if isinstance(value, Tensor) else value
                raise ValueError(f"unfold_column_chunks: {key!r} must be dense [N, C * {num_chunks}, ...], got {shape}")
            tensors[key] = value.reshape(len(self) * num_chunks, value.shape[1] // num_chunks, *value.shape[2:])
        return self.rebuild(tensors, dict(repeated.non_tensors), self.meta_info)

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[Self]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over; shuffled anew each epoch when there is a seed.

        The order depends on the seed alone.

        Raises:
            ValueError: at the call, when a number is none, or the rows do not divide into mini-batches.
        """
        mini_batch_size = _check_count("make_iterator: the mini-batch size", mini_batch_size, 1)
        epochs = _check_count("make_iterator: epochs", epochs, 0)
        if seed is not None:
            seed = _check_count("make_iterator: the seed", seed, 0)
            if seed >= 1 << 63:
                raise ValueError(f"make_iterator: the seed must be < 2**63, got {seed}")
        if len(self) % mini_batch_size:
            raise ValueError(f"make_iterator: {len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        return self._iterate(mini_batch_size, epochs, seed)

    def _iterate(self, mini_batch_size: int, epochs: int, seed: int | None) -> Iterator[Self]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            rows = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
            for batch in rows.split(mini_batch_size) if len(rows) else ():
                yield self.select_rows(batch)

    def with_meta(self, meta_info: dict[str, Any]) -> Self:
        return self.rebuild(dict(self.tensors), dict(self.non_tensors), meta_info)

    @abstractmethod
    def rebuild(self, tensors: dict[str, Any], non_tensors: dict[str, Any], meta_info: dict[str, Any]) -> Self: ...

    def _reshape(self, operation: str, change: Any) -> Self:
        for key, value in self.tensors.items():
            if isinstance(value, Ragged):
                raise ValueError(f"{operation}: {key!r} is ragged; select the dense fields first")
        tensors = {key: change(value) for key, value in self.tensors.items()}
        return self.rebuild(tensors, {key: change(value) for key, value in self.non_tensors.items()}, self.meta_info)


def _check_count(what: str, value: Any, least: int) -> int:
    """`value` as an int of Python, whichever kind of integer it is."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{what} must be a whole number >= {least}, got {value!r}")
    return int(value)


def _concat_arrays(key: str, values: list[np.ndarray]) -> np.ndarray:
    """Texts may differ in width; beyond that, dtypes and trailing shapes must be the same."""
    kinds = {v.dtype.kind if v.dtype.kind in "US" else str(v.dtype) for v in values}
    if len(kinds) > 1 or len({v.shape[1:] for v in values}) > 1:
        have = sorted({f"{v.dtype} {v.shape[1:]}" for v in values})
        raise ValueError(f"concat: {key!r} differs in dtype or shape beyond the rows: {have}")
    return np.concatenate(values)


def _concat_field(key: str, values: list[Any]) -> Tensor | Ragged:
    kinds = {(type(v).__name__, str(v.dtype)) for v in values}
    if len(kinds) > 1:
        raise ValueError(f"concat: {key!r} differs in kind or dtype between the parts: {sorted(kinds)}")
    if isinstance(values[0], Ragged):
        return Ragged.concat(values)
    if len(shapes := {tuple(v.shape[1:]) for v in values}) > 1:
        raise ValueError(f"concat: {key!r} differs in shape beyond the rows: {sorted(shapes)}")
    return torch.cat(values)


def _concat_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        for key, value in meta.items():
            if key == "metrics":
                for entry in value if isinstance(value, list) else [value]:
                    if not isinstance(entry, Mapping):
                        raise ValueError(f"concat: meta_info['metrics'] must hold dictionaries, got {entry!r:.80}")
                    for name, number in entry.items():
                        metrics.setdefault(name, []).extend(number if isinstance(number, list) else [number])
            elif key in merged and not same_meta(merged[key], value):
                raise ValueError(f"concat: meta_info[{key!r}] differs between the parts: {merged[key]!r} and {value!r}")
            else:
                merged[key] = value
    return {**merged, "metrics": metrics} if metrics else merged


def same_meta(a: Any, b: Any) -> bool:
    """Equality of two meta values, tensors and arrays included; NaN equals NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_meta(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same_meta(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return tensors_equal(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        left, right = np.asarray(a), np.asarray(b)
        return type(a) is type(b) and left.shape == right.shape and same_meta(left.tolist(), right.tolist())
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return type(a) is type(b) and bool(a == b)
