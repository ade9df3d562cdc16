"""How trained weights get to the engines: one protocol, one loop, two ways of transport.

                ┌ tensor: shared memory or CUDA IPC, one machine
buckets ─► send ┤
                └ distributed: broadcast over gloo or NCCL, any machines
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from slime_rl.config import Config
from slime_rl.weight_sync.bucket import Bucket, FlatBuffer, Slot
from slime_rl.weight_sync.session import EngineSession

TIMEOUT_S = 300.0  # for one request to an engine, such as loading a bucket


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one weight update moved."""

    version: int
    num_tensors: int
    num_bytes: int  # sent to each engine
    seconds: float  # with the engines' pause, from the first request to the last answer


class WeightSender(Protocol):
    """`--weight-sync`: sends weights to every engine. Lives in train rank 0; not thread-safe."""

    def send(self, buckets: Iterator[Bucket], version: int) -> SyncReport:
        """Replace the engines' weights by those in `buckets` (Hugging Face names, full tensors), named `version`.

        Requests in flight continue afterwards. While a bucket travels the next one is taken from the iterator.

        Raises:
            EngineError, RuntimeError: an engine did not do its part; the engines stay paused.
        """
        ...

    def close(self) -> None:
        """Give back memory, connections and process groups. Idempotent."""
        ...


class Transport(Protocol):
    """The part of a sender that differs: from a filled buffer to the engines."""

    def make_buffer(self) -> FlatBuffer: ...

    def post(self, flat: Tensor, slots: list[Slot]) -> Future[Any]:
        """Put `flat [B]` uint8 on its way; the future is done when every engine has loaded it."""
        ...

    def close(self) -> None: ...


class BucketSender:
    """The WeightSender of both transports: two buffers, of which one is filled while the other travels."""

    def __init__(self, engines: EngineSession, transport: Transport, mode: Literal["retract", "in_place"]) -> None:
        self.engines, self.transport = engines, transport
        self.mode: Literal["retract", "in_place"] = mode
        self._buffers = [transport.make_buffer(), transport.make_buffer()]

    def send(self, buckets: Iterator[Bucket], version: int) -> SyncReport:
        """See WeightSender.send."""
        started = time.perf_counter()
        num_tensors = num_bytes = 0
        on_the_way: list[Future[Any]] = []  # at most one
        with self.engines.update(version, self.mode):
            try:
                for index, bucket in enumerate(buckets):
                    flat, slots = self._buffers[index % 2].fill(bucket)
                    while on_the_way:
                        on_the_way.pop().result()
                    on_the_way.append(self.transport.post(flat, slots))
                    num_tensors += len(slots)
                    num_bytes += flat.numel()
                if not on_the_way:
                    raise ValueError(f"weight update to version {version} has no tensors to send")
                on_the_way.pop().result()
            finally:
                wait(on_the_way)  # after a failure: engines may still read a buffer
        seconds = time.perf_counter() - started
        return SyncReport(version=version, num_tensors=num_tensors, num_bytes=num_bytes, seconds=seconds)

    def close(self) -> None:
        """See WeightSender.close."""
        self.transport.close()
        self.engines.close()
        self._buffers = []


def make_sender(config: Config, engine_urls: Sequence[str], *, host: str = "127.0.0.1") -> WeightSender:
    """The sender for `--weight-sync`. `host` is this machine's address as the engines reach it (distributed).

    Engines of one sender stay the same; make a new one when the list changes or an engine was restarted. Close it: what
    a process that just exits has in shared memory may stay there.
    """
    from slime_rl.weight_sync.distributed import DistributedTransport
    from slime_rl.weight_sync.tensor import TensorTransport

    engines = EngineSession(engine_urls, TIMEOUT_S)
    num_shards = config.cluster.rollout_num_gpus_per_engine
    transport: Transport
    if config.weight_sync.weight_sync == "tensor":
        transport = TensorTransport(engines, num_shards)
    else:
        transport = DistributedTransport(engines, num_shards, host)
    return BucketSender(engines, transport, config.rollout.weight_update_mode)
