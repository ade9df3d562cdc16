"""Giving a worker's device memory to the engines, and taking it back.

Parameters, gradient buffers, master weights and Adam's moments are views into a few storages. Each storage is copied to
the host and shrunk to nothing, and later grown and filled again, so that every view stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_rl.trainer.model import unwrap
from slime_rl.trainer.state import TrainState


@dataclass
class _Parked:
    storage: torch.UntypedStorage
    size: int  # bytes on the device
    host: torch.UntypedStorage | None  # None: content is not needed again


def offload(state: TrainState) -> list[_Parked]:
    """Empty every storage of the training state; what to give to `onload`."""
    gradients = {t.untyped_storage().data_ptr() for t in _gradients(state.models)}
    parked = []
    for storage in _storages([*_gradients(state.models), *_tensors(state)]):
        host = None
        if storage.data_ptr() not in gradients:  # gradients are zeroed before they are used again
            host = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            ).untyped_storage()
            host.copy_(storage)
        parked.append(_Parked(storage, storage.nbytes(), host))
        storage.resize_(0)
    if state.device.type == "cuda":
        torch.cuda.empty_cache()
    return parked


def onload(parked: list[_Parked]) -> None:
    """Grow the storages again and fill them."""
    for item in parked:
        item.storage.resize_(item.size)
        if item.host is not None:
            item.storage.copy_(item.host)


def _gradients(models: list[Any]) -> Iterator[Tensor]:
    for model in models:
        yield from (buffer.grad_data for buffer in _ddp_buffers(model))


def _ddp_buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def _tensors(state: TrainState) -> Iterator[Tensor]:
    for model in state.models:
        yield from (v for v in unwrap(model).state_dict(keep_vars=True).values() if isinstance(v, Tensor))
        yield from (b.param_data for b in _ddp_buffers(model) if b.param_data is not None)
    for part in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for values in part.optimizer.state.values():
            yield from (v for v in values.values() if isinstance(v, Tensor))


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    """Every storage once, those with bytes."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()}
    return list(found.values())
