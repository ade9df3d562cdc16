"""Prefill and decode on different engines on CPU: what SGLang's transfer of the KV cache does with CUDA, without it."""

from __future__ import annotations

import importlib
import sys
import types

from slime_rl.engine.cpu.stand_ins import usable
from slime_rl.engine.cpu.transfer import TransferEngine

IDLE_MS = 5


def install() -> None:
    """Page indices are plain arrays: as tensors they would be copied through pinned memory, in an order of CUDA's.
    An idle engine looks for arrived caches often: it sleeps until a message, and theirs come to another thread.
    Mooncake is what is installed, if it imports.
    """
    if not usable("mooncake") or not usable("mooncake.engine"):
        package, engine = types.ModuleType("mooncake"), types.ModuleType("mooncake.engine")
        package.__path__ = []
        vars(engine)["TransferEngine"] = TransferEngine
        sys.modules |= {"mooncake": package, "mooncake.engine": engine}
    connection = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
    connection.MooncakeKVSender.supports_host_tensor_indices = False
    idle = importlib.import_module("sglang.srt.managers.scheduler_components.idle_sleeper")
    idle.IdleSleeper.maybe_sleep = lambda self: self.poller.poll(IDLE_MS)
