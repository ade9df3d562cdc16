"""Process groups of one worker: Megatron's model-parallel layout, seen from this rank."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slime_rl.config import ParallelConfig
from slime_rl.trainer.device import DeviceInfo

TIMEOUT = datetime.timedelta(minutes=30)  # a rank that waits longer for the others fails instead of hanging forever


@dataclass(frozen=True)
class Axis:
    """One dimension of the layout: its group, how many workers are in it, and which one this is."""

    group: Any
    size: int
    rank: int


@dataclass(frozen=True)
class Layout:
    """Where this worker stands. tp: tensor, pp: pipeline, cp: context, dp: data (without cp), dp_cp: both."""

    tp: Axis
    pp: Axis
    cp: Axis
    dp: Axis
    dp_cp: Axis
    vpp_size: int | None  # model chunks of one pipeline stage; None without interleaving

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage of this worker's pipeline."""
        return mpu.get_pipeline_model_parallel_last_rank()


def initialize(
    parallel: ParallelConfig,
    megatron_args: dict[str, Any],
    device: DeviceInfo,
    rank: int,
    world_size: int,
    master: tuple[str, int],
    local_rank: int,
    seed: int,
) -> Layout:
    """Join the process group at `master` (address, port), make Megatron's groups and seed its random generators.

    Raises:
        ValueError: the parallel sizes do not fit `world_size`.
    """
    shards = parallel.model_parallel_size
    if world_size % shards:
        raise ValueError(
            f"--train-num-workers must be a multiple of {shards} (tensor x pipeline x context), got {world_size}"
        )
    dist.init_process_group(
        device.backend,
        init_method=f"tcp://{master[0]}:{master[1]}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=device.torch_device(local_rank) if device.kind == "cuda" else None,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron_args.get("virtual_pipeline_model_parallel_size"),
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron_args.get("expert_tensor_parallel_size"),
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
    )
    model_parallel_cuda_manual_seed(seed)
    return _layout()


def initialize_alone(device: DeviceInfo, store: Path) -> None:
    """Megatron's groups for this process alone, for what needs its models but no other worker."""
    init = f"file://{store}"
    dist.init_process_group(device.backend, init_method=init, rank=0, world_size=1, timeout=TIMEOUT)
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)


def _layout() -> Layout:
    def axis(group: Any) -> Axis:
        return Axis(group, dist.get_world_size(group), dist.get_rank(group))

    return Layout(
        tp=axis(mpu.get_tensor_model_parallel_group()),
        pp=axis(mpu.get_pipeline_model_parallel_group()),
        cp=axis(mpu.get_context_parallel_group()),
        dp=axis(mpu.get_data_parallel_group()),
        dp_cp=axis(mpu.get_data_parallel_group(with_context_parallel=True)),
        vpp_size=mpu.get_virtual_pipeline_model_parallel_world_size(),
    )


def shutdown() -> None:
    """Leave the process group; the worker cannot be used afterwards."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def reduce_max(value: int, axis: Axis, device: torch.device) -> int:
    """Largest `value` over an axis."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=axis.group)
    return int(tensor.item())


def gather_ragged(rows: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """`rows [n, ...]` of every worker on an axis, in rank order; n may differ, the rest may not."""
    if axis.size == 1:
        return [rows]
    counts = torch.zeros(axis.size, dtype=torch.int64, device=rows.device)
    counts[axis.rank] = len(rows)
    dist.all_reduce(counts, group=axis.group)
    longest = int(counts.max())
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(axis.size)]
    dist.all_gather(parts, padded, group=axis.group)
    return [part[:count] for part, count in zip(parts, counts.tolist(), strict=True)]
