"""DataProto: the batch container. Tensors (dense or ragged), other arrays and meta info under one consistency rule.

    DataProto
    ├── tensors      name -> Tensor [N, ...] or Ragged [N rows]
    ├── non_tensors  name -> numpy array [N, ...], usually of objects
    └── meta_info    name -> anything; belongs to the batch, not to its rows

Its operations mean what they mean in verl. It crosses Ray's object store without being copied or turned into lists:
what arrives shares the store's memory, so clone a tensor before writing to it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from slime_rl.data.arrays import array_to_tensor, is_whole, layout_problem, tensor_to_array, tensors_equal, to_row_index
from slime_rl.data.ragged import Ragged
from slime_rl.data.rearrange import Rearrange, same_meta


@dataclass(frozen=True)
class DataProtoItem:
    """One row: tensors without their first dimension, and plain objects."""

    tensors: dict[str, Tensor]
    non_tensors: dict[str, Any]
    meta_info: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.tensors[key] if key in self.tensors else self.non_tensors[key]


class DataProto(Rearrange):
    """N rows of named fields. Invariant: every field has N rows, and no name is both a tensor and a non-tensor."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor | Ragged] | None = None,
        non_tensors: Mapping[str, np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        for name, given in (("tensors", tensors), ("non_tensors", non_tensors), ("meta_info", meta_info)):
            if given is not None and not isinstance(given, Mapping):
                raise ValueError(f"{name} must be a dictionary, got {type(given).__name__}")
        self.tensors: dict[str, Tensor | Ragged] = dict(tensors or {})
        self.non_tensors: dict[str, np.ndarray] = dict(non_tensors or {})
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Like the constructor, but lists become tensors, and any sequence of objects becomes an object array."""
        converted = {k: v if isinstance(v, Tensor | Ragged) else _as_tensor(k, v) for k, v in (tensors or {}).items()}
        arrays = {k: v if isinstance(v, np.ndarray) else _as_objects(k, v) for k, v in (non_tensors or {}).items()}
        return cls(converted, arrays, meta_info)

    def check_consistency(self) -> None:
        """Raise ValueError naming the field that breaks the rule."""
        for key, value in self.tensors.items():
            if not isinstance(value, Tensor | Ragged):
                raise ValueError(f"tensors[{key!r}] must be a Tensor or Ragged, got {type(value).__name__}")
            if isinstance(value, Tensor) and (problem := layout_problem(value)):
                raise ValueError(f"tensors[{key!r}] {problem}")
            if isinstance(value, Tensor) and value.ndim == 0:
                raise ValueError(f"tensors[{key!r}] has no rows: it is a scalar; put it into meta_info")
        for key, value in self.non_tensors.items():
            if not isinstance(value, np.ndarray) or value.ndim == 0:
                raise ValueError(f"non_tensors[{key!r}] must be a numpy array with rows, got {type(value).__name__}")
            if key in self.tensors:
                raise ValueError(f"{key!r} is both a tensor and a non-tensor")
        rows = {key: len(value) for key, value in self._fields().items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"fields must have equal numbers of rows, got {rows}")

    def _fields(self) -> dict[str, Any]:
        return {**self.tensors, **self.non_tensors}

    def keys(self) -> list[str]:
        return list(self._fields())

    def __contains__(self, key: str) -> bool:
        return key in self.tensors or key in self.non_tensors

    def __len__(self) -> int:
        return next((len(value) for value in self._fields().values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and of non-object arrays."""
        arrays = sum(a.nbytes for a in self.non_tensors.values() if a.dtype != object)
        return sum(t.nbytes for t in self.tensors.values()) + arrays

    def __getitem__(self, item: Any) -> Any:
        """A name gives that field, an int one DataProtoItem; slice, list, array, tensor or mask give a DataProto."""
        if isinstance(item, str):
            if item not in self:
                raise KeyError(f"no field {item!r}; there are {', '.join(map(str, _sorted(self.keys()))) or 'none'}")
            return self.tensors[item] if item in self.tensors else self.non_tensors[item]
        if is_whole(item):
            item = int(item)
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of {len(self)} rows")
            tensors = {key: value[item] for key, value in self.tensors.items()}
            return DataProtoItem(tensors, {k: v[item] for k, v in self.non_tensors.items()}, self.meta_info)
        return self.select_rows(item)

    def select_rows(self, rows: Any) -> Self:
        """The given rows in the given order; a slice shares memory."""
        index = to_row_index(rows, len(self))
        tensors: dict[str, Any] = {}
        for key, value in self.tensors.items():
            on_device = index if isinstance(index, slice) or isinstance(value, Ragged) else index.to(value.device)
            tensors[key] = value[on_device]
        picked = index if isinstance(index, slice) else index.numpy()
        return self.rebuild(tensors, {k: v[picked] for k, v in self.non_tensors.items()}, self.meta_info)

    def rebuild(self, tensors: dict[str, Any], non_tensors: dict[str, np.ndarray], meta_info: dict[str, Any]) -> Self:
        """One of this type with other content; the meta info is copied one level deep."""
        return type(self)(tensors, non_tensors, meta_info)

    # Columns. These give plain DataProtos: a schema holds for whole batches only.

    def select(self, keys: Sequence[str], meta_keys: Sequence[str] | None = None, deepcopy: bool = False) -> DataProto:
        """A batch of the named fields only, sharing storage unless `deepcopy`. All meta info unless `meta_keys`."""
        self._require(keys, "select")
        tensors: dict[str, Any] = {k: self.tensors[k] for k in keys if k in self.tensors}
        arrays = {k: self.non_tensors[k] for k in keys if k in self.non_tensors}
        if deepcopy:
            tensors = {k: _clone(v) for k, v in tensors.items()}
            arrays = {k: v.copy() for k, v in arrays.items()}
        if meta_keys is not None and (missing := [k for k in meta_keys if k not in self.meta_info]):
            raise ValueError(f"select: no meta_info {missing}; there is {_sorted(self.meta_info)}")
        meta = self.meta_info if meta_keys is None else {k: self.meta_info[k] for k in meta_keys}
        return DataProto(tensors, arrays, meta)

    def pop(self, keys: Sequence[str], meta_keys: Sequence[str] = ()) -> DataProto:
        """Remove the named fields and return them as a batch. A missing one is an error, and nothing is removed."""
        taken = self.select(keys, meta_keys)
        for key in keys:
            self.tensors.pop(key, None)
            self.non_tensors.pop(key, None)
        for key in meta_keys:
            self.meta_info.pop(key, None)
        return taken

    def rename(self, old: str | Sequence[str], new: str | Sequence[str]) -> Self:
        """Give fields other names, in place; returns self."""
        olds, news = ([old] if isinstance(old, str) else list(old)), ([new] if isinstance(new, str) else list(new))
        if len(olds) != len(news):
            raise ValueError(f"rename: {len(olds)} old names but {len(news)} new ones")
        self._require(olds, "rename")
        names = dict(zip(olds, news, strict=True))
        if len(names) < len(olds):
            raise ValueError(f"rename: a field has one new name, got {olds}")
        after = [names.get(key, key) for key in self.keys()]
        if len(set(after)) < len(after):
            raise ValueError(f"rename: {news} would overwrite fields that exist: {_sorted(self.keys())}")
        self.tensors = {names.get(k, k): v for k, v in self.tensors.items()}
        self.non_tensors = {names.get(k, k): v for k, v in self.non_tensors.items()}
        return self

    def union(self, other: DataProto) -> Self:
        """Add the fields and meta info of `other`, in place; returns self.

        A name that both have must hold equal values (NaN equals NaN); otherwise ValueError, and nothing is changed.
        """
        if not isinstance(other, DataProto):
            raise ValueError(f"union: needs a DataProto, got {type(other).__name__}")
        if self.keys() and other.keys() and len(self) != len(other):
            raise ValueError(f"union: {len(self)} and {len(other)} rows")
        for key in self._fields().keys() & other._fields().keys():
            if not _same_field(self[key], other[key]):
                raise ValueError(f"union: {key!r} is in both batches with different values")
        for key in self.meta_info.keys() & other.meta_info.keys():
            if not same_meta(self.meta_info[key], other.meta_info[key]):
                mine, theirs = self.meta_info[key], other.meta_info[key]
                raise ValueError(f"union: meta_info[{key!r}] differs: {mine!r} and {theirs!r}")
        self.tensors = {**self.tensors, **other.tensors}
        self.non_tensors = {**self.non_tensors, **other.non_tensors}
        self.meta_info = {**self.meta_info, **other.meta_info}
        return self

    def to(self, device: torch.device | str) -> Self:
        """The same rows with tensors on `device`."""
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"to: needs a device, got {device!r}: {error}") from error
        return self.rebuild({k: v.to(device) for k, v in self.tensors.items()}, self.non_tensors, self.meta_info)

    def _require(self, keys: Sequence[str], operation: str) -> None:
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise ValueError(f"{operation}: needs a list of names, got {keys!r:.80}")
        if missing := [key for key in keys if key not in self]:
            raise ValueError(f"{operation}: no field {missing}; there are {_sorted(self.keys())}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DataProto):
            return NotImplemented
        mine, theirs = self._fields(), other._fields()
        same_fields = mine.keys() == theirs.keys() and all(_same_field(mine[k], theirs[k]) for k in mine)
        return same_fields and same_meta(self.meta_info, other.meta_info)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = self._fields().items()
        shown = [f"{k}: {v if isinstance(v, Ragged) else f'{v.dtype}{list(v.shape)}'}" for k, v in fields]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(shown)}; meta {_sorted(self.meta_info)})"

    def __reduce__(self) -> tuple[Any, ...]:
        packed = {k: v if isinstance(v, Ragged) else tensor_to_array(v) for k, v in self.tensors.items()}
        return _unpickle, (type(self), packed, self.non_tensors, self.meta_info)


def _unpickle(cls: type[DataProto], packed: dict[str, Any], arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> Any:
    tensors = {k: v if isinstance(v, Ragged) else array_to_tensor(*v) for k, v in packed.items()}
    return cls(tensors, arrays, meta)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """`[N]` of objects. numpy would turn a list of equal-length lists into a matrix; this never does."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _sorted(names: Iterable[Any]) -> list[Any]:
    """Keys of meta info may be of several types, which Python does not compare."""
    return sorted(names, key=str)


def _as_tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"tensors[{key!r}] cannot become a tensor: {error}; rows of different lengths are a Ragged, and objects "
            "belong into non_tensors"
        ) from error


def _as_objects(key: str, value: Any) -> np.ndarray:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"non_tensors[{key!r}] must be an array or a list with a row each, got {type(value).__name__}")
    return object_array(value)


def _clone(value: Tensor | Ragged) -> Tensor | Ragged:
    return value.clone() if isinstance(value, Tensor) else Ragged(value.values.clone(), value.offsets.clone())


def _same_field(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Ragged):
        return a == b
    if isinstance(a, Tensor):
        return tensors_equal(a, b)
    return a.dtype == b.dtype and same_meta(a, b)
