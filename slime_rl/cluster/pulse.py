"""Tells a process that works from one that stands still: a thread that answers a byte with a byte.

A train worker computes in Ray's only thread for it, so Ray itself cannot ask it anything meanwhile.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from dataclasses import dataclass

BYTE = b"."
_ASKED_WITHIN_S = 1.0  # a caller that says nothing must not keep the next one waiting


@dataclass(frozen=True)
class Pulse:
    """Where to feel it, and what to end when there is none."""

    host: str
    port: int
    pid: int
    node_id: str

    def beats(self, timeout_s: float) -> bool:
        """Whether the process answers within `timeout_s`; one that has ended does not."""
        try:
            with socket.create_connection((self.host, self.port), timeout=timeout_s) as connection:
                connection.settimeout(timeout_s)
                connection.sendall(BYTE)
                return connection.recv(1) == BYTE
        except OSError:
            return False


def start_pulse(host: str, node_id: str) -> Pulse:
    """Answer at a free port of `host` from a daemon thread, as long as this process lives."""
    listener = socket.create_server((host, 0), backlog=8)
    threading.Thread(target=_answer, args=(listener,), name="pulse", daemon=True).start()
    return Pulse(host, listener.getsockname()[1], os.getpid(), node_id)


def end_process(pid: int) -> None:
    """SIGKILL, which a stopped process cannot ignore either."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended in the meantime


def _answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_ASKED_WITHIN_S)
            try:
                if connection.recv(1) == BYTE:
                    connection.sendall(BYTE)
            except OSError:
                continue  # whoever asked has gone
