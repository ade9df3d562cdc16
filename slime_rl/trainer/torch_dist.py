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
import zipfile
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
Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes)


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
    (folder / FORMAT_FILE).write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )


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


class TorchDistReader:
    """A checkpoint folder, by any writer and of any parallel layout."""

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            ValueError: no torch_dist checkpoint, or one without its index.
        """
        if not is_torch_dist(folder):
            raise ValueError(f"{folder}: must hold a torch_dist checkpoint ({METADATA}, {FORMAT_FILE})")
        self.folder = folder
        try:
            content = _IndexUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{folder / METADATA}: cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(content, Metadata):
            raise ValueError(
                f"{folder / METADATA}: must hold the index of a torch_dist checkpoint, got {type(content)}"
            )
        self._metadata = content
        self._storage: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset or ())): info for index, info in self._stored()
        }
        self._files: dict[str, Any] = {}

    def _stored(self) -> Iterable[tuple[Any, Any]]:
        return self._metadata.storage_data.items()

    @property
    def keys(self) -> list[str]:
        """Names of the tensors, as Megatron spells them."""
        return [k for k, v in self._metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)]

    def common(self) -> dict[str, Any]:
        """What is no tensor."""
        return torch.load(self.folder / COMMON, map_location="cpu", weights_only=True)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """The whole tensor, or a box of it.

        Raises:
            ValueError: it is not there, a part of it is missing, or a data file is cut off.
        """
        entry = self._tensor(key)
        offsets, sizes = box or ((0,) * len(entry.size), tuple(entry.size))
        target: Tensor | None = None
        covered = 0
        for chunk in entry.chunks:
            overlap = _overlap((offsets, sizes), (tuple(chunk.offsets), tuple(chunk.sizes)))
            if overlap is None:
                continue
            stored = self._load(key, tuple(chunk.offsets))
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

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{self.folder}: there is no tensor {key} in this checkpoint")
        return entry

    def _load(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        info = self._storage[key, offsets]
        path = self.folder / info.relative_path
        if info.relative_path not in self._files:
            try:
                with path.open("rb") as opened:  # private: nobody can write to the file through a tensor
                    self._files[info.relative_path] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ValueError(f"{self.folder}: the data file {info.relative_path} is missing: {error}") from error
        data = self._files[info.relative_path]
        if info.offset + info.length > len(data):
            raise ValueError(f"{path}: is cut off, the data of {key} is not all there")
        try:
            return saved_tensor(data, info.offset, info.length)
        except (RuntimeError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{path}: the data of {key} is damaged: {error}") from error

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
