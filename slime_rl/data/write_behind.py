"""Sending a file to the disk while it is still being written, so that the flush at its end has little left to do."""

from __future__ import annotations

import ctypes
import os
from typing import IO

PIECE = 8 * 1024 * 1024  # bytes between two calls
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait


class WriteBehind:
    """`advance()` after writes to `file`, `finish()` at the end: then everything is on the disk."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sent = file, 0
        self._begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; elsewhere only the end flushes

    def advance(self) -> None:
        at = self._file.tell()
        if self._begin is None or at - self._sent < PIECE:
            return
        self._file.flush()
        self._begin(self._file.fileno(), ctypes.c_int64(self._sent), ctypes.c_int64(at - self._sent), _WRITE)
        self._sent = at

    def finish(self) -> None:
        """Raise OSError where the disk did not take it all."""
        self._file.flush()
        os.fsync(self._file.fileno())
