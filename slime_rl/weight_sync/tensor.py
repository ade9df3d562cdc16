"""Weights through memory that trainer and engine share on one machine; only handles travel by HTTP.

CPU: anonymous memory of the trainer, which engines map once by /proc/PID/fd/N. It has no name that could be left
     behind, and needs no room in /dev/shm. Engines are told of each bucket by `line.py`.
GPU: CUDA IPC. The engine reads the handles with an unpickler that allows torch's own rebuild functions and
     `types.SimpleNamespace`, so nothing of sglang needs to be imported here.
"""

from __future__ import annotations

import base64
import io
import mmap
import os
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from slime_rl.weight_sync.bucket import FlatBuffer, Slot
from slime_rl.weight_sync.instructions import Instruction, spot_checksum
from slime_rl.weight_sync.line import EngineLines
from slime_rl.weight_sync.session import EngineSession

DEVICE_ARGUMENT = 6  # position of the device index among the arguments of torch's rebuild_cuda_tensor


class TensorTransport:
    """Shares its flat buffers with every rank of every engine on this machine."""

    changed_share = 1.0
    room = 2

    def __init__(self, engines: EngineSession) -> None:
        self.engines = engines
        self._memory: dict[int, int] = {}  # address of a buffer on the CPU -> its descriptor
        self._lines: EngineLines | None = None  # of the update in hand

    def make_buffer(self) -> FlatBuffer:
        return FlatBuffer(self._allocate)

    def begin(self, version: int) -> None:
        """Hang up what a broken update has left."""
        self._hang_up()

    def end(self) -> None:
        """See Transport.end."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def post(self, flat: Tensor, slots: list[Slot]) -> tuple[Future[Any], int]:
        """See Transport.post."""
        if not flat.is_cuda:
            return self._line().send(self._instruction(flat, slots)), flat.numel()
        torch.cuda.synchronize(flat.device)  # the engines read on streams that do not wait for ours
        # Each reader gets a handle of its own: torch counts them.
        handles = [[payload(flat, slots) for _ in range(ranks)] for ranks in self.engines.num_ranks()]
        return self.engines.start(lambda engine, index: engine.update_from_tensor(handles[index])), flat.numel()

    def _line(self) -> EngineLines:
        if self._lines is None:
            self._lines = EngineLines(self.engines)
            self._lines.open()
        return self._lines

    def _hang_up(self) -> None:
        if self._lines is not None:
            self._lines.drop()
            self._lines = None

    def _instruction(self, flat: Tensor, slots: list[Slot]) -> Instruction:
        return Instruction(
            kind="shared",
            path=f"/proc/{os.getpid()}/fd/{self._memory[flat.data_ptr()]}",
            num_bytes=flat.numel(),
            checksum=spot_checksum(flat),
            slots=tuple((s.name, str(s.dtype).removeprefix("torch."), tuple(s.shape), s.start) for s in slots),
        )

    def _allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Bytes `[num_bytes]` of any value that another process can map."""
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        descriptor = os.memfd_create("slime_rl_weights")
        os.ftruncate(descriptor, num_bytes)
        memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        self._memory[memory.data_ptr()] = descriptor
        return memory

    def engines_changed(self) -> None:
        """The update in hand, if there is one, has broken off."""
        self._hang_up()

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last map of it. Idempotent."""
        self._hang_up()
        for descriptor in self._memory.values():
            os.close(descriptor)
        self._memory = {}


def payload(flat: Tensor, slots: list[Slot]) -> str:
    """One flattened bucket as the base64 text that SGLang's /update_weights_from_tensor takes, for one reader."""
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=slot.shape,
            dtype=slot.dtype,
            start_idx=slot.start,
            end_idx=slot.end,
            numel=slot.end - slot.start,
        )
        for slot in slots
    ]
    content = io.BytesIO()
    ForkingPickler(content).dump({"flattened_tensor": _CudaHandle(flat), "metadata": metadata})
    return base64.b64encode(content.getvalue()).decode()


class _CudaHandle:
    """Pickles as an IPC handle that names the GPU by UUID: the engine may number the GPUs in another way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
