"""torch_dist files (PyTorch's distributed checkpoint) read and written tensor by tensor, without any process group.

    .metadata       every tensor: its whole shape and type, its boxes, and in which file at which byte each box lies
    __N_0.distcp    the boxes, one after the other, each as torch.save writes a tensor
    metadata.json, common.pt   what Megatron adds: the format's name, and objects that are no tensors

Megatron reads and writes the same files in training; here one tensor at a time is in memory.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_rl.data.write_behind import WriteBehind
from slime_rl.trainer.saved_tensor import saved_tensor

METADATA, FORMAT_FILE, COMMON = ".metadata", "metadata.json", "common.pt"
_FORMAT = {  # what FORMAT_FILE says, by any version of Megatron so far
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}
MAX_OPEN_FILES = 128  # of each reader: a run of a thousand ranks has more files than a process may open
Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes)


def check_format(folder: Path) -> None:
    """Check that metadata.json, which Megatron believes, names the format that is read here.

    Raises:
        ValueError: it does not, or cannot be read; names file, rule and value.
    """
    path = folder / FORMAT_FILE
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or "sharded_backend" not in content or _FORMAT | content != _FORMAT:
        raise ValueError(f"{path}: must hold {json.dumps(_FORMAT)}, got {json.dumps(content)[:200]}")


def is_torch_dist(folder: Path) -> bool:
    return (folder / METADATA).is_file() and (folder / FORMAT_FILE).is_file()


@dataclass(frozen=True)
class Written:
    """One box in a file."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    start: int
    length: int


class TorchDistFile:
    """One data file that is being written, in a `with` block; it is flushed to disk at the end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name = f"__{rank}_0.distcp"
        self._file = open(folder / self.name, "wb")  # noqa: SIM115 (closed in __exit__)
        self._behind = WriteBehind(self._file)
        self.boxes: list[Written] = []

    def __enter__(self) -> TorchDistFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file, self._behind:
            if error is None:
                self._behind.finish()

    def write(self, key: str, whole: tuple[int, ...], offsets: tuple[int, ...], tensor: Tensor) -> None:
        """Append `tensor` as the box at `offsets` of `key`; leading axes of length 1 are added as `whole` has them."""
        sizes = (1,) * (len(whole) - tensor.dim()) + tuple(tensor.shape)
        start = self._file.tell()
        _save(tensor.reshape(sizes).contiguous(), self._file)
        length = self._file.tell() - start
        self._behind.advance()
        self.boxes.append(Written(key, whole, offsets, sizes, tensor.dtype, self.name, start, length))


def _save(content: Any, file: IO[bytes]) -> None:
    """torch.save, but a full disk is an OSError: torch hides it behind an error of its own."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_index(folder: Path, boxes: Iterable[Written], common: dict[str, Any]) -> None:
    """The files that make the data files of all writers one checkpoint; written last."""
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for box in boxes:
        if box.key not in tensors:
            blank = torch.empty(0, dtype=box.dtype)
            properties = TensorProperties.create_from_tensor(blank)
            tensors[box.key] = TensorStorageMetadata(properties, torch.Size(box.whole), [])
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        tensors[box.key].chunks.append(chunk)
        storage[MetadataIndex(box.key, torch.Size(box.offsets))] = _StorageInfo(box.file, box.start, box.length)
    with open(folder / COMMON, "wb") as file:
        _save(common, file)
    (folder / METADATA).write_bytes(pickle.dumps(Metadata(tensors, None, storage)))
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT))


# What an index is made of, whoever wrote it. A checkpoint may come from anywhere: nothing else is looked up.
_WRITE_DATA = ("TensorWriteData", "BytesIOWriteData")
_OF_AN_INDEX = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", *_WRITE_DATA),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreSavePlan",),
    "builtins": ("set", "frozenset"),
    "collections": ("OrderedDict", "defaultdict"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _OF_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in an index")


@dataclass(frozen=True)
class _StoredBox:
    """A part of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class _StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_StoredBox, ...]


def _tensors_of(index: Metadata) -> dict[str, _StoredTensor]:
    """The tensors of an index, with the boxes that are in a file. Whatever is damaged in it raises something."""
    content: dict[Any, Any] = index.storage_data
    places: dict[tuple[str, tuple[int, ...]], Any] = {
        (place.fqn, tuple(place.offset or ())): info for place, info in content.items()
    }
    tensors: dict[str, _StoredTensor] = {}
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        boxes = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if (info := places.get((key, offsets))) is not None:
                boxes.append(_StoredBox(offsets, sizes, str(info.relative_path), int(info.offset), int(info.length)))
        tensors[key] = _StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(boxes))
    return tensors


class TorchDistReader:
    """A checkpoint folder, by any writer and of any parallel layout."""

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            ValueError: no torch_dist checkpoint, one without its index, or of another format.
        """
        if not is_torch_dist(folder):
            raise ValueError(f"{folder}: must hold a torch_dist checkpoint ({METADATA}, {FORMAT_FILE})")
        check_format(folder)
        self.folder = folder
        try:
            content = _IndexUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{folder / METADATA}: cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(content, Metadata):
            raise ValueError(
                f"{folder / METADATA}: must hold the index of a torch_dist checkpoint, got {type(content)}"
            )
        try:
            self._tensors = _tensors_of(content)
        except Exception as error:  # it was read, but parts of it are not what they must be
            raise ValueError(f"{folder / METADATA}: is damaged: {type(error).__name__}: {error}") from error
        self._files: dict[str, Any] = {}

    @property
    def keys(self) -> list[str]:
        """Names of the tensors, as Megatron spells them."""
        return list(self._tensors)

    def common(self) -> dict[str, Any]:
        """What is no tensor."""
        return torch.load(self.folder / COMMON, map_location="cpu", weights_only=True)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensor(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).dtype

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """The whole tensor, or a box of it.

        Raises:
            ValueError: it is not there, a part of it is missing, or a data file is cut off or damaged.
        """
        entry = self._tensor(key)
        offsets, sizes = box or ((0,) * len(entry.shape), entry.shape)
        target: Tensor | None = None
        covered = 0
        for place in entry.boxes:
            overlap = _overlap((offsets, sizes), (place.offsets, place.sizes))
            if overlap is None:
                continue
            stored = self._load(key, entry.dtype, place)
            into, source, count = overlap
            if count == _count(sizes) == stored.numel():
                return stored.reshape(sizes)
            if target is None:
                target = torch.empty(sizes, dtype=stored.dtype)
            target[into] = stored[source]
            covered += count
        if target is None or covered != _count(sizes):
            raise ValueError(f"{self.folder}: {key} is incomplete: {covered} of {_count(sizes)} values are stored")
        return target

    def _tensor(self, key: str) -> _StoredTensor:
        if key not in self._tensors:
            raise ValueError(f"{self.folder}: there is no tensor {key} in this checkpoint")
        return self._tensors[key]

    def _load(self, key: str, dtype: torch.dtype, place: _StoredBox) -> Tensor:
        path, sizes = self.folder / place.file, torch.Size(place.sizes)
        if place.file not in self._files:
            if len(self._files) >= MAX_OPEN_FILES:  # the oldest; what was read of it keeps its map
                del self._files[next(iter(self._files))]
            try:
                with path.open("rb") as opened:  # private: nobody can write to the file through a tensor
                    self._files[place.file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise ValueError(f"{self.folder}: the data file {place.file} is missing: {error}") from error
            except ValueError as error:  # of an empty file there is no map
                raise ValueError(f"{path}: is cut off, it is empty") from error
        data = self._files[place.file]
        if place.start + place.length > len(data):
            raise ValueError(f"{path}: is cut off, the data of {key} is not all there")
        try:
            tensor = saved_tensor(data, place.start, place.length)
            found = tensor.dtype, tensor.shape
        except Exception as error:  # damaged bytes may raise anything
            raise ValueError(f"{path}: the data of {key} is damaged: {type(error).__name__}: {error}") from error
        if found != (dtype, sizes):
            raise ValueError(
                f"{path}: the data of {key} is damaged: it must be {dtype} {list(sizes)} by the index, got {found[0]} "
                f"{list(found[1])}"
            )
        return tensor

    def close(self) -> None:
        """Let go of the files; tensors that were read stay valid."""
        self._files.clear()


def _count(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _overlap(wanted: Box, stored: Box) -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
    """(slices of the wanted box, slices of the stored one, number of values) where the two meet; None if nowhere."""
    into, source, count = [], [], 1
    for want, size, have, length in zip(*wanted, *stored, strict=True):
        first, last = max(want, have), min(want + size, have + length)
        if last <= first:
            return None
        into.append(slice(first - want, last - want))
        source.append(slice(first - have, last - have))
        count *= last - first
    return tuple(into), tuple(source), count
