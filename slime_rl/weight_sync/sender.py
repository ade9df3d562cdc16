"""How trained weights get to the engines: one protocol, one loop, and a transport.

                ┌ tensor: shared memory or CUDA IPC, one machine
buckets ─► send ┼ distributed: broadcast over gloo or NCCL, any machines
                └ disk, disk-delta: files that both sides reach
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from slime_rl.config import Config
from slime_rl.engine.control import EngineError, EngineRefused
from slime_rl.weight_sync.bucket import Bucket, FlatBuffer, Slot
from slime_rl.weight_sync.report import SyncReport
from slime_rl.weight_sync.session import EngineSession

TIMEOUT_S = 300.0  # for one request to an engine, such as loading a bucket


class WeightSender(Protocol):
    """`--weight-sync`: sends weights to every engine. Lives in train rank 0; not thread-safe."""

    def send(self, buckets: Iterator[Bucket], version: int) -> SyncReport:
        """Replace the engines' weights by those in `buckets` (Hugging Face names, full tensors), named `version`.

        Requests in flight continue afterwards. While a bucket travels the next one is taken from the iterator, which is
        always used up. Engines that are lost on the way are left out and reported.

        Raises:
            EngineRefused: every engine refuses these weights.
            RuntimeError: an engine reports another version afterwards; the engines stay paused.
        """
        ...

    def connect(self, engine_urls: Sequence[str]) -> None:
        """Send to these engines from now on."""
        ...

    def close(self) -> None:
        """Give back memory, connections and process groups. Idempotent."""
        ...


class Transport(Protocol):
    """The part of a sender that differs: from a filled buffer to the engines.

    `changed_share` of the last update: the share of values that were sent, less than 1 where only changed ones are.
    `room`: buckets on CPU that may be on the way at once; more than one only where their order does not matter.
    """

    room: int

    @property
    def changed_share(self) -> float: ...

    def make_buffer(self) -> FlatBuffer: ...

    def begin(self, version: int) -> None:
        """The buckets that follow are of this version."""
        ...

    def end(self) -> None:
        """Every engine that is left has loaded all of them."""
        ...

    def post(self, flat: Tensor, slots: list[Slot]) -> tuple[Future[Any], int]:
        """Put `flat [B]` uint8 on its way; the future is done when every engine has loaded it. With the bytes sent.

        Raises:
            GroupBroken: the way itself is lost, so that the update must be repeated with the engines that are left.
        """
        ...

    def engines_changed(self) -> None:
        """Other engines, or fewer, from now on."""
        ...

    def close(self) -> None: ...


class GroupBroken(Exception):
    """An engine was lost while all of them received by one broadcast."""


class BucketSender:
    """The WeightSender of all transports: one buffer is filled while the others travel."""

    def __init__(self, engines: EngineSession, transport: Transport, mode: Literal["retract", "in_place"]) -> None:
        self.engines, self.transport = engines, transport
        self.mode: Literal["retract", "in_place"] = mode
        self._buffers = [transport.make_buffer() for _ in range(transport.room + 1)]

    def send(self, buckets: Iterator[Bucket], version: int) -> SyncReport:
        """See WeightSender.send."""
        started = time.perf_counter()
        num_tensors = num_bytes = 0
        updated: list[str] = []
        try:
            with self.engines.update(version, self.mode) as opened:
                num_tensors, num_bytes = self._send_buckets(buckets, version, opened)
            updated = [engine.url for engine in self.engines.controls]
        except EngineRefused:
            raise
        except (EngineError, GroupBroken):
            self.transport.engines_changed()
        finally:
            for _ in buckets:  # gathering them is collective: the other train workers must not be left waiting
                pass
        if self.engines.failed:
            self.transport.engines_changed()
        return SyncReport(
            version=version,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - started,
            updated=updated,
            failed={url: str(error) for url, error in self.engines.failed.items()},
            changed_share=self.transport.changed_share,
        )

    def _send_buckets(self, buckets: Iterator[Bucket], version: int, opened: Future[Any]) -> tuple[int, int]:
        """(tensors, bytes) sent. The first bucket is filled while the engines get ready (`opened`)."""
        num_tensors = num_bytes = 0
        on_the_way: deque[Future[Any]] = deque()
        try:
            for index, bucket in enumerate(buckets):
                room = 1 if bucket[0][1].is_cuda else self.transport.room  # memory of GPUs is dear
                flat, slots = self._buffers[index % (room + 1)].fill(bucket)
                if index == 0:
                    opened.result()
                    self.transport.begin(version)
                while len(on_the_way) >= room:
                    on_the_way.popleft().result()
                loading, sent = self.transport.post(flat, slots)
                on_the_way.append(loading)
                num_tensors += len(slots)
                num_bytes += sent
            if not num_tensors:
                raise ValueError(f"weight update to version {version} has no tensors to send")
            while on_the_way:
                on_the_way.popleft().result()
            self.transport.end()
        finally:
            wait([opened, *on_the_way])  # after a failure: engines may still read a buffer
        return num_tensors, num_bytes

    def connect(self, engine_urls: Sequence[str]) -> None:
        """See WeightSender.connect."""
        if list(engine_urls) != [engine.url for engine in self.engines.controls]:
            self.transport.engines_changed()
        self.engines.connect(engine_urls)

    def close(self) -> None:
        """See WeightSender.close."""
        self.transport.close()
        self.engines.close()
        self._buffers = []


def make_sender(config: Config, engine_urls: Sequence[str], *, host: str = "127.0.0.1") -> WeightSender:
    """The sender for `--weight-sync`. `host` is this machine's address as the engines reach it (distributed).

    Close it: what a process that just exits has in shared memory may stay there.
    """
    from slime_rl.weight_sync.distributed import DistributedTransport
    from slime_rl.weight_sync.files import DiskTransport
    from slime_rl.weight_sync.tensor import TensorTransport

    external = bool(config.cluster.rollout_external_engine_addrs)
    engines = EngineSession(engine_urls, TIMEOUT_S, config.engine.authorization, external=external)
    transport: Transport
    kind = config.weight_sync.weight_sync
    if kind == "tensor":
        transport = TensorTransport(engines)
    elif kind == "distributed":
        transport = DistributedTransport(engines, host)
    else:
        folder = Path(config.weight_sync.weight_sync_dir or config.run_dir / "weight_sync")
        transport = DiskTransport(engines, folder, deltas=kind == "disk-delta")
    return BucketSender(engines, transport, config.rollout.weight_update_mode)
