"""The outside of `sandbox_exam`: hands out a test's statements when the program has ended, and hears of their end."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from functools import cache
from pathlib import Path
from types import TracebackType


class Examiner:
    """For one run of a program. Enter it, pass `command` and `of_program` to the new process, then `start`."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.ticket, self.mark = secrets.token_hex(16), secrets.token_hex(16)
        self.heard = b""

    def __enter__(self) -> Examiner:
        self.answers, tell = os.pipe()
        take, self.orders = os.pipe()
        self.of_program = (tell, take)
        self.command = ["-c", _exam_source(), str(tell), str(take)]
        self.thread = threading.Thread(target=self._examine, daemon=True)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if not self.thread.ident:  # never started
            for fd in (*self.of_program, self.answers, self.orders):
                os.close(fd)

    def start(self) -> None:
        """Call it when the process has been started."""
        for fd in self.of_program:
            os.close(fd)  # so that the end of the process is the end of the stream
        self.thread.start()

    def passed(self) -> bool:
        """Whether the end of the statements was reached; call it when the process has ended."""
        self.thread.join(1.0)  # a process that escaped may hold the pipe
        return not self.thread.is_alive() and self.heard == self.mark.encode()

    def _examine(self) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.orders, self.ticket.encode())
                if self._read(len(self.ticket)) == self.ticket.encode():
                    rest = memoryview((self.mark + self.check).encode(errors="surrogatepass"))
                    while rest:
                        rest = rest[os.write(self.orders, rest) :]
            os.close(self.orders)
            self.heard = self._read(len(self.mark) + 1)
        finally:
            os.close(self.answers)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := os.read(self.answers, size - len(data))):
            data += part
        return data


@cache
def _exam_source() -> str:
    return Path(__file__).with_name("sandbox_exam.py").read_text(encoding="utf-8")
