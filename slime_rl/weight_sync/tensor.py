"""Weights through memory that trainer and engine share: POSIX shared memory on CPU, CUDA IPC on GPU.

Only handles travel by HTTP. The engine reads them with an unpickler that allows torch's own rebuild functions and
`types.SimpleNamespace`, so nothing of sglang needs to be imported here.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from slime_rl.weight_sync.bucket import FlatBuffer, Slot
from slime_rl.weight_sync.session import EngineSession

SHARED_MEMORY = "/dev/shm"
DEVICE_ARGUMENT = 6  # position of the device index among the arguments of torch's rebuild_cuda_tensor


class TensorTransport:
    """Shares one flat buffer with every rank of every engine on this machine."""

    def __init__(self, engines: EngineSession, num_shards: int) -> None:
        self.engines, self.num_shards = engines, num_shards

    def make_buffer(self) -> FlatBuffer:
        return FlatBuffer(allocate_shared)

    def post(self, flat: Tensor, slots: list[Slot]) -> Future[Any]:
        """See Transport.post. Each reader gets a handle of its own: torch counts them."""
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)  # the engines read on streams that do not wait for ours
        payloads = [[payload(flat, slots) for _ in range(self.num_shards)] for _ in self.engines.controls]
        return self.engines.start(lambda engine, index: engine.update_from_tensor(payloads[index]))

    def close(self) -> None:
        """Nothing is held beyond the buffers."""


def allocate_shared(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes `[num_bytes]` of any value that another process can map.

    Raises:
        RuntimeError: shared memory has not the room. (Writing beyond it would end the process by SIGBUS.)
    """
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    stat = os.statvfs(SHARED_MEMORY)
    free = stat.f_bavail * stat.f_frsize
    if free < num_bytes:
        raise RuntimeError(
            f"--weight-sync tensor needs {num_bytes} bytes in {SHARED_MEMORY}, where {free} are free; lower "
            "--weight-sync-bucket-bytes, use --weight-sync distributed, or give the container more (docker --shm-size)"
        )
    with file_system_sharing():
        storage = torch.UntypedStorage._new_shared(num_bytes)  # share_memory_() would fill and copy it once more
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextmanager
def file_system_sharing() -> Iterator[None]:
    """Share CPU memory by name. torch's default passes descriptors, which needs related processes: an engine that gets
    one from us dies with "digest sent was rejected"."""
    before = torch_multiprocessing.get_sharing_strategy()
    torch_multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch_multiprocessing.set_sharing_strategy(before)


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
    shared = _CudaHandle(flat) if flat.is_cuda else flat
    content = io.BytesIO()
    with file_system_sharing():
        ForkingPickler(content).dump({"flattened_tensor": shared, "metadata": metadata})
    return base64.b64encode(content.getvalue()).decode()


class _CudaHandle:
    """Pickles as an IPC handle that names the GPU by UUID: the engine may number the GPUs in another way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
