"""Sending a file to the disk while it is still being written, so that the flush at its end has little left to do."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import IO

PIECE = 8 * 1024 * 1024  # bytes between two calls
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait


class WriteBehind:
    """In a `with` block: `advance()` after writes to `file`, `finish()` at the end, then everything is on the disk.

    The disk is told by a thread: telling it waits while its queue is full.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sent = file, 0
        self._begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; elsewhere only the end flushes
        self._thread = ThreadPoolExecutor(1, "write-behind")

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)

    def advance(self) -> None:
        at = self._file.tell()
        if self._begin is None or at - self._sent < PIECE:
            return
        self._file.flush()
        start, count = ctypes.c_int64(self._sent), ctypes.c_int64(at - self._sent)
        self._thread.submit(self._begin, self._file.fileno(), start, count, _WRITE)
        self._sent = at

    def finish(self) -> None:
        """Raise OSError where the disk did not take it all."""
        self._file.flush()
        os.fsync(self._file.fileno())
