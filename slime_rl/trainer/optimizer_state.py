"""The optimizer's state for a checkpoint: gathered over the data-parallel workers with as few copies as it takes.

Megatron's own way (`DistributedOptimizer.get_parameter_state_dp_zero`) fills three buffers with zeros before it copies
into them, gathers where there is one worker too, and joins lists; the loop waits for all of it in every save. With
several buckets (--megatron-overlap-grad-reduce) it also cuts the padding between them out and then reads every
parameter at its place of before, so that the wrong numbers are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")


@contextmanager
def gathered_directly(optimizer: Any) -> Iterator[None]:
    """Within it, Megatron's `sharded_state_dict` of the optimizer for a save gathers as this file does."""
    parts = [one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if hasattr(one, "gbuf_ranges")]
    for part in parts:
        part.get_parameter_state_dp_zero = lambda part=part, **_: _gather(part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def _gather(optimizer: Any) -> dict[Any, Any]:
    """Per buffer, dtype and kind of state what `[start:end]` of a parameter reads, on every rank. Collective."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        ((dtype, held),) = ranges.items()
        is_alone = optimizer.data_parallel_group.size() == 1
        read = _alone if is_alone else _from_all
        state[index] = {dtype: {key: read(optimizer, buffer, held, key) for key in KEYS}}
    return state


class _Spans:
    """The states of whole parameters where a flat buffer with all of them is expected."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        """`tensors` are flat, by the place of their first element in the buffer."""
        self.tensors = tensors

    def __getitem__(self, span: slice) -> Tensor:
        return self.tensors[span.start]


def _alone(optimizer: Any, buffer: Any, _: Any, key: str) -> _Spans:
    """The optimizer's own tensors, not copied: who writes while training goes on makes the copy."""
    starts = {parameter: start for parameter, (start, _, _) in buffer.param_index_map.items()}
    return _Spans({start: _state(optimizer, parameter, key).cpu().view(-1) for parameter, start in starts.items()})


def _from_all(optimizer: Any, buffer: Any, held: list[Any], key: str) -> Tensor:
    """`[n]` float32 on the CPU: every bucket from all workers.

    With the padding at the end of each, since places are counted with it; what it holds is not read.
    """
    group, parts = optimizer.data_parallel_group, []
    for bucket, ranges in zip(buffer.buckets, held, strict=True):
        data = bucket.grad_data
        own = torch.empty(data.numel() // group.size(), dtype=torch.float32, device=data.device)
        for parameter, where in ranges["param_map"].items():
            span = where["gbuf_local"]
            own[span.start : span.end].copy_(_state(optimizer, parameter, key))
        whole = torch.empty(data.numel(), dtype=torch.float32, device=data.device)
        dist.all_gather_into_tensor(whole, own, group=group)
        parts.append(whole.cpu())
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _state(optimizer: Any, parameter: Any, key: str) -> Tensor:
    return optimizer._get_main_param_and_optimizer_states(parameter)[key].detach()
