"""Which device and process-group backend this process uses. The one place that asks."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """What a worker computes on and how it talks to the others."""

    kind: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    has_transformer_engine: bool

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")


def resolve_device(requested: Literal["auto", "cpu", "cuda"]) -> DeviceInfo:
    """The device for `--device`.

    Raises:
        ValueError: cuda was asked for and torch finds none.
    """
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if requested == "cpu" or not has_cuda:
        return DeviceInfo("cpu", "gloo", has_transformer_engine=False)
    return DeviceInfo("cuda", "nccl", importlib.util.find_spec("transformer_engine") is not None)


def prepare_process(device: DeviceInfo, local_rank: int, num_threads: int, num_workers: int) -> None:
    """Set threads and the current device, and install the stand-ins Megatron needs without CUDA or Transformer Engine.

    Must run before anything imports megatron or mbridge.
    """
    if device.kind == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // num_workers))
    if not device.has_transformer_engine:
        from slime_rl.trainer.cpu import proxy

        proxy.install(without_cuda=device.kind == "cpu")
