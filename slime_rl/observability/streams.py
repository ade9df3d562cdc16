"""What is said to the user never ends a run: its results are in files, whoever reads the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import IO


def keep_standard_streams() -> None:
    """Make descriptors 0 to 2 and their streams usable, whatever the process was started with.

    A closed one would become the number of the next file or socket, into which libraries then print. What the stream's
    encoding cannot say is escaped.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor was closed when Python started, and may be another file's by now
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it may be one that cannot be written to any more
                stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print a line to `stream`, standard output when not given.

    Once it cannot be written to (a pipe that nobody reads, a full disk, a terminal that is gone), nothing is written to
    it any more.
    """
    target: IO[str] = sys.stdout if stream is None else stream
    try:
        print(text, file=target, flush=True)
    except OSError:
        # What is still in its buffer would fail again at exit, and give the process another exit code.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())
