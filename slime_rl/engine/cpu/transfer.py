"""Stand-in for `mooncake.engine`, which prefill engines write the KV cache to decode engines with: the same over TCP.

    writer ──count, (address, length)…, bytes──► listener of the engine that registered the memory ──one byte: done

Mooncake itself needs libraries of RDMA devices. What is written really travels, into registered memory only.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

COUNT, PIECE = struct.Struct("!I"), struct.Struct("!QQ")
MAX_PIECES = 1 << 20
DONE = b"\1"
LIMIT_S = 30.0
PAUSE_S = 0.5


class TransferEngine:
    """What SGLang calls of Mooncake's class of this name; answers are 0, or negative after a failure."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}  # address -> length
        self._peers: dict[str, socket.socket] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._listener: socket.socket | None = None

    def initialize(self, hostname: str, *_: Any) -> int:
        """Listen on `hostname`; metadata server, protocol and device of the original mean nothing here."""
        self._listener = socket.create_server((hostname, 0))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        assert self._listener is not None, "initialize comes first"
        return self._listener.getsockname()[1]

    def register_memory(self, address: int, length: int) -> int:
        self._regions[address] = length
        return 0

    def unregister_memory(self, address: int) -> int:
        self._regions.pop(address, None)
        return 0

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        self._regions |= dict(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        for address in addresses:
            self.unregister_memory(address)
        return 0

    def send_probe(self, session: str) -> int:
        return self._send(session, [], [], [])

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        return self._send(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy `lengths` bytes from our `sources` to the `targets` of `session` (host:port), all or nothing told."""
        return self._send(session, sources, targets, lengths)

    def _send(self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> int:
        head = COUNT.pack(len(targets)) + b"".join(map(PIECE.pack, targets, lengths))
        with self._locks.setdefault(session, threading.Lock()):
            try:
                peer = self._peers.get(session)
                if peer is None:
                    host, _, port = session.rpartition(":")
                    peer = self._peers[session] = socket.create_connection((host, int(port)), LIMIT_S)
                peer.sendall(head)
                for source, length in zip(sources, lengths, strict=True):
                    peer.sendall(memory(source, length))
                if peer.recv(1) == DONE:
                    return 0
                raise ConnectionError("the memory was not registered, or the engine ended")
            except OSError as error:
                logger.warning("KV cache could not be written to %s: %s", session, error)
                if (broken := self._peers.pop(session, None)) is not None:
                    broken.close()
                return -1

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, address = listener.accept()
            except OSError as error:  # such as too many open files: those who come later may have more luck
                logger.warning("could not accept KV cache: %s", error)
                time.sleep(PAUSE_S)
                continue
            threading.Thread(target=self._receive, args=(peer, address), daemon=True).start()

    def _receive(self, peer: socket.socket, address: Any) -> None:
        """Take writes until the writer goes, or names memory that is not registered."""
        with peer, suppress(OSError):  # it has gone while it was answered
            while (head := read(peer, COUNT.size)) is not None:
                (count,) = COUNT.unpack(head)
                pieces = read(peer, count * PIECE.size) if count <= MAX_PIECES else None
                if pieces is None or not all(self._holds(*piece) for piece in PIECE.iter_unpack(pieces)):
                    logger.warning("refused to take KV cache from %s", address)
                    return
                for at, length in PIECE.iter_unpack(pieces):
                    if not read_into(peer, memory(at, length)):
                        return
                peer.sendall(DONE)

    def _holds(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in self._regions.items())


def memory(address: int, length: int) -> memoryview:
    """`length` bytes of this process at `address`."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def read(peer: socket.socket, length: int) -> bytes | None:
    """None when the peer goes before `length` bytes."""
    buffer = bytearray(length)
    return bytes(buffer) if read_into(peer, memoryview(buffer)) else None


def read_into(peer: socket.socket, view: memoryview) -> bool:
    while view:
        try:
            count = peer.recv_into(view)
        except OSError:
            return False
        if not count:
            return False
        view = view[count:]
    return True
