"""What travels between the fence's owner, its supervisors and their workers: frames of bytes over pipes.

A frame is 8 bytes of length, big-endian, then the content. Requests are one line of JSON (module, function, timeout_s)
and the pickled arguments; answers are JSON, because unpickling what a worker wrote would let it run code in the owner.
An empty frame from the owner withdraws the request that it waits for. One that comes when the answer is already written
means nothing: the owner sends the next request, behind it, only when it has read that answer.
Between supervisor and worker each frame begins with a nonce of the request: the worker confirms a request by sending
the nonce alone, so that what an earlier call wrote into the pipe cannot pass for a later one's answer.
"""

from __future__ import annotations

import os
import select
import struct
import time
from enum import StrEnum

MAX_ANSWER_BYTES = 16 * 1024 * 1024  # a worker that sends more is taken for broken, before it fills the owner's memory
NONCE_BYTES = 16
WITHDRAWN = b""  # the content of the frame that withdraws a request
_LENGTH = struct.Struct(">Q")


def folder_prefix(supervisor: int) -> str:
    """How the names of the folders begin that the supervisor with this process id makes for its workers."""
    return f"fence-{supervisor}-"


class Failure(StrEnum):
    """Why a fenced call gave no value."""

    TIMEOUT = "timeout"  # the deadline passed
    CRASH = "crash"  # the process died, or its answer could not be read
    MEMORY = "memory"  # it asked for more memory than it may have
    PROCESSES = "processes"  # it started more processes than it may have
    ERROR = "error"  # the function raised, or could not be imported


class FrameError(Exception):
    """A frame that is broken off or too long."""


class DeadlineError(FrameError):
    """A frame that did not come in time."""


def write_frame(fd: int, content: bytes) -> None:
    """Write one frame to a blocking pipe. Raises OSError when nobody reads it any more."""
    view = memoryview(_LENGTH.pack(len(content)) + content)
    while view:
        view = view[os.write(fd, view) :]


def read_frame(fd: int, deadline: float | None = None, max_bytes: int = 1 << 40) -> bytes | None:
    """The next frame, or None at the end of the stream. `deadline` is a time of the monotonic clock.

    Raises:
        FrameError: the stream ends inside a frame, or the frame is longer than `max_bytes`.
        DeadlineError: it is not there by the deadline.
    """
    head = _read_exactly(fd, _LENGTH.size, deadline, may_end=True)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise FrameError(f"a frame of {length} bytes, over {max_bytes}")
    return _read_exactly(fd, length, deadline, may_end=False)


def _read_exactly(fd: int, size: int, deadline: float | None, may_end: bool) -> bytes | None:
    parts: list[bytes] = []
    missing = size
    poller = select.poll()  # not select.select, which refuses descriptors above 1023
    poller.register(fd, select.POLLIN)
    while missing:
        if deadline is not None and not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DeadlineError("no answer by the deadline")
        part = os.read(fd, min(missing, 1 << 20))
        if not part:
            if may_end and missing == size:
                return None
            raise FrameError("the stream ended inside a frame")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
