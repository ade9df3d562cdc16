"""Runs inside an engine's scheduler: loads weights as the trainer's instructions say. SGLang calls `load` by its name.

    instruction ──► shared: views into the trainer's memory ─────────────┐
                    file: tensors of a safetensors file ─────────────────┼─► model.load_weights (fuses and shards)
                    delta: kept weights ^ what the file holds ───────────┘
                    follow: further instructions, line by line (line.py)

Every tensor-parallel rank reads for itself. What an update leaves for the next (maps, kept weights) hangs on the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime_rl.weight_sync.delta import apply_delta, unpack
from slime_rl.weight_sync.instructions import Instruction, spot_checksum

logger = logging.getLogger(__name__)

ATTRIBUTE = "_slime_rl_receiver"
FOLLOW_LIMIT_S = 300.0  # for the next instruction of a trainer that lives
MAX_MAPS = 6  # three buffers of a trainer, and three of the one before it


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Follow the instruction in the name of the only entry; its tensor carries nothing."""
    receiver = getattr(model, ATTRIBUTE, None)
    if receiver is None:
        receiver = Receiver()
        setattr(model, ATTRIBUTE, receiver)
    ((text, _),) = named_tensors
    instruction = Instruction.from_text(text)
    if instruction.kind == "release":
        receiver.release(model)
    elif instruction.kind == "resume":
        receiver.resume(model)
    elif instruction.kind == "follow":
        receiver.follow(model, instruction)
    else:
        model.load_weights(receiver.tensors(instruction))


class Receiver:
    """Turns instructions into named tensors `(Hugging Face name, full tensor)` on the CPU.

    Raises:
        ValueError: a checksum or a base version does not match; the update fails and the engine is replaced.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[str, int, int], Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._kept_version: int | None = None
        self._released: list[tuple[torch.UntypedStorage, int]] = []  # with their sizes in bytes

    def release(self, model: Any) -> None:
        """Free the memory of every weight; nothing may run on the model before `resume` and a whole update.

        What SGLang marks as no weight, such as the scales of a quantised cache, is in no update and stays.
        """
        weights = [p for p in model.parameters() if not getattr(p, "_skip_weight_check", False)]
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in weights}
        for storage in storages.values():
            if storage.nbytes() and storage.resizable():
                self._released.append((storage, storage.nbytes()))
                storage.resize_(0)
            elif storage.nbytes():
                _drop_pages(storage)

    def resume(self, model: Any) -> None:
        """Undo `release`, but for the content."""
        for storage, size in self._released:
            storage.resize_(size)
        self._released = []

    def follow(self, model: Any, instruction: Instruction) -> None:
        """Load what the trainer's lines say until an empty one, or until it is gone: an update that was left open is
        begun again by the next trainer, and an error here would end the engine."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trainer, contextlib.suppress(ConnectionError):
            trainer.settimeout(FOLLOW_LIMIT_S)
            trainer.connect(f"\0{instruction.path}")
            trainer.sendall(f"{instruction.word}\n".encode())
            with trainer.makefile("rb") as lines:
                for line in lines:
                    if line == b"\n":
                        return
                    model.load_weights(self.tensors(Instruction.from_text(line.decode())))
                    trainer.sendall(b"ok\n")
        logger.warning("the trainer has left in the middle of a weight update")

    def tensors(self, instruction: Instruction) -> Iterator[tuple[str, Tensor]]:
        if instruction.kind == "shared":
            return self._shared(instruction)
        content = _read(instruction)
        return self._file(instruction, content) if instruction.kind == "file" else self._delta(instruction, content)

    def _shared(self, instruction: Instruction) -> Iterator[tuple[str, Tensor]]:
        flat = self._map(instruction.path, instruction.num_bytes)
        _compare("shared memory", instruction, spot_checksum(flat[: instruction.num_bytes]))
        for name, dtype_name, shape, start in instruction.slots:
            dtype = getattr(torch, dtype_name)
            size = dtype.itemsize * torch.Size(shape).numel()
            yield name, flat[start : start + size].view(dtype).view(shape)

    def _map(self, path: str, num_bytes: int) -> Tensor:
        """The trainer's memory; mapped once, since the first touch of every page is what costs."""
        status = os.stat(path)
        key = (path, status.st_dev, status.st_ino)
        if key not in self._maps:
            if status.st_size < num_bytes:
                raise ValueError(f"{path} has {status.st_size} bytes where {num_bytes} are to be read")
            handle = os.open(path, os.O_RDWR)
            try:
                self._maps[key] = torch.frombuffer(mmap.mmap(handle, status.st_size), dtype=torch.uint8)
            finally:
                os.close(handle)
            while len(self._maps) > MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))
        return self._maps[key]

    def _file(self, instruction: Instruction, content: bytes) -> Iterator[tuple[str, Tensor]]:
        from safetensors.torch import load as load_safetensors

        if self._kept_version != instruction.version:
            self._kept, self._kept_version = {}, instruction.version
        tensors = load_safetensors(content)
        if instruction.keep:
            self._kept |= tensors
        yield from tensors.items()

    def _delta(self, instruction: Instruction, content: bytes) -> Iterator[tuple[str, Tensor]]:
        if self._kept_version not in (instruction.base, instruction.version):
            raise ValueError(
                f"{instruction.path} changes version {instruction.base}, but this engine has {self._kept_version}"
            )
        self._kept_version = instruction.version
        for part in unpack(content):
            if part.name not in self._kept:
                raise ValueError(f"{instruction.path} changes {part.name}, which no full update has brought")
            apply_delta(part, self._kept[part.name])
            yield part.name, self._kept[part.name]


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """Free the whole pages of what torch does not resize any more, since numpy has seen it (SGLang's checksum)."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
    libc = ctypes.CDLL(None, use_errno=True)
    if size > 0 and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
        logger.warning("%d bytes of weights stay in memory: %s", size, os.strerror(ctypes.get_errno()))


def _read(instruction: Instruction) -> bytes:
    with open(instruction.path, "rb") as file:
        content = file.read()
    if len(content) != instruction.num_bytes:
        raise ValueError(f"{instruction.path} has {len(content)} bytes, {instruction.num_bytes} were written")
    _compare(instruction.path, instruction, zlib.crc32(content))
    return content


def _compare(what: str, instruction: Instruction, found: int) -> None:
    if found != instruction.checksum:
        raise ValueError(f"{what}: checksum {found:08x} where {instruction.checksum:08x} was sent")
