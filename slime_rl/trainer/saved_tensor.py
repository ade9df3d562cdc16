"""A tensor that torch.save wrote somewhere in a memory-mapped file, as a view: nothing is copied.

torch.load maps whole files only. What torch.save writes is a zip without compression: a pickle that says type, offset,
sizes and strides, and the values.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from typing import Any

import torch
from torch import Tensor

_LOCAL_HEADER_BYTES = 30


def saved_tensor(data: mmap.mmap, start: int, length: int) -> Tensor:
    """The tensor in `data[start : start + length]`, valid as long as it is used.

    Raises:
        zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError: the bytes are no whole tensor.
    """
    with zipfile.ZipFile(_Window(data, start, length)) as archive:
        (pickled,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        first = _first_byte(data, start, pickled)
        text = data[first : first + pickled.file_size]
        try:
            storage, offset, size, stride = _TensorUnpickler(io.BytesIO(text)).load()[:4]
            kind, key = storage[1], storage[2]
        except (pickle.UnpicklingError, TypeError, ValueError, IndexError):  # a tensor subclass, or another version's
            return torch.load(io.BytesIO(data[start : start + length]), map_location="cpu", weights_only=True)
        values = archive.getinfo(f"{pickled.filename.removesuffix('data.pkl')}data/{key}")
    if values.file_size == 0:
        return torch.empty(size, dtype=kind.dtype)
    first, count = _first_byte(data, start, values), values.file_size // kind.dtype.itemsize
    return torch.frombuffer(data, dtype=kind.dtype, count=count, offset=first).as_strided(size, stride, offset)


def _first_byte(data: mmap.mmap, start: int, entry: zipfile.ZipInfo) -> int:
    """Where an entry's contents begin in the mapped file. They are not checked: torch may leave their sums out."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{entry.filename} is compressed")
    header = start + entry.header_offset
    name_bytes, extra_bytes = struct.unpack("<HH", data[header + 26 : header + _LOCAL_HEADER_BYTES])
    return header + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


class _TensorUnpickler(pickle.Unpickler):
    """Gives the arguments that a tensor would be rebuilt from; builds nothing and knows no other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in a tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Window(io.RawIOBase):
    """Some bytes of a mapped file, as a file."""

    def __init__(self, data: mmap.mmap, start: int, length: int) -> None:
        self._data, self._start, self._length, self._at = data, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        first = self._start + self._at
        buffer[:count] = self._data[first : first + count]
        self._at += count
        return count
