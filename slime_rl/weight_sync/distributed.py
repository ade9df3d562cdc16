"""Weights by broadcast: trainer and every rank of every engine form one process group, gloo on CPU and NCCL on GPU.

rank 0: the trainer      rank 1 … S: engine 0      rank S+1 … S+T: engine 1      (S, T: their tensor-parallel sizes)
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import Future, wait
from datetime import timedelta
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from slime_rl.weight_sync.bucket import FlatBuffer, Slot
from slime_rl.weight_sync.sender import GroupBroken
from slime_rl.weight_sync.session import EngineSession

GROUP_TIMEOUT_S = 120.0
POLL_S = 0.002
RECEIVE_FAILED = "Failed to receive weights"  # how SGLang says that a broadcast broke off


class DistributedTransport:
    """Broadcasts flat buffers; the group is made at the first one, when the device is known."""

    changed_share = 1.0
    room = 1  # broadcasts must be received in the order they are sent

    def __init__(self, engines: EngineSession, host: str) -> None:
        self.engines, self.host = engines, host
        self.group_name = ""
        self._group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = None

    def make_buffer(self) -> FlatBuffer:
        return FlatBuffer(lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def begin(self, version: int) -> None:
        """Nothing depends on it."""

    def end(self) -> None:
        """Nothing is left to do."""

    def post(self, flat: Tensor, slots: list[Slot]) -> tuple[Future[Any], int]:
        """See Transport.post. Returns when the bytes have left; the engines then load them.

        Raises:
            EngineError: no engine is left.
            GroupBroken: an engine refused, or ended while it received.
        """
        if self._group is None:
            self._group = self._make_group("nccl" if flat.is_cuda else "gloo")
        names = [slot.name for slot in slots]
        dtypes = [str(slot.dtype).removeprefix("torch.") for slot in slots]
        shapes = [list(slot.shape) for slot in slots]
        answers = self.engines.start(
            lambda engine, _: engine.update_from_distributed(names, dtypes, shapes, group=self.group_name)
        )
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([flat], options)
        while not work.is_completed():
            if answers.done() and (answers.exception() or self.engines.failed):
                self._give_up(answers)  # an engine that fails leaves the broadcast waiting
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError:  # gloo: the connection to an engine was closed
            self._give_up(answers)
        return answers, flat.numel()

    def _give_up(self, answers: Future[Any]) -> NoReturn:
        """Engines that only could not receive because of another one are as good as before."""
        self._group = self._store = None  # the others' receive ends with its sockets
        wait([answers])
        lost = {url: error for url, error in self.engines.failed.items() if RECEIVE_FAILED not in str(error)}
        if not lost and (error := answers.exception()):
            raise error
        self.engines.failed = lost
        raise GroupBroken(f"lost {', '.join(lost)}")

    def engines_changed(self) -> None:
        """Leave the group; the next bucket makes one with the engines that are there then."""
        self.close()

    def close(self) -> None:
        """Leave the group. Idempotent; engines that are gone are not asked."""
        if self._group is None:
            return
        dist.destroy_process_group(self._group)
        self._group = self._store = None

    def _make_group(self, backend: str) -> dist.ProcessGroup:
        """The same steps, prefixes included, as SGLang's side takes: a store of our own and torch's inner constructor.
        The public one would make it the default group, which belongs to the trainer."""
        self.group_name = f"slime_{uuid.uuid4().hex[:8]}"  # an engine may still hold the group of an earlier run
        *first_ranks, world_size = accumulate(self.engines.num_ranks(), initial=1)
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        self._store = TCPStore(
            self.host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        port = self._store.port
        joined = self.engines.start(
            lambda engine, index: engine.join_update_group(
                self.host,
                port,
                rank=first_ranks[index],
                world_size=world_size,
                group=self.group_name,
                backend=backend,
            )
        )
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            PrefixStore(self.group_name, self._store),
            group_name=self.group_name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        joined.result()
        assert isinstance(group, dist.ProcessGroup)  # rank 0 is a member
        return group
