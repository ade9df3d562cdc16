"""Runs a Python program that nobody trusts: a fresh interpreter with hard limits, no network and a folder of its own.

It is meant to be called inside the process fence, which adds a deadline and the hunt for processes left behind:

    reward or tool ──► ProcessFence ──► worker: run_program ──► python -I main.py (limits, seccomp, empty folder)

What the program cannot do: use more than its CPU seconds or memory, write a large file, open a network socket, signal
or trace other processes. It can read files that the run's user may read, and write where that user may write.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from slime_rl.rollout.rewards.seccomp import deny_network_and_signals

MAX_OUTPUT_BYTES = 64 * 1024
MAX_FILE_BYTES = 16 * 1024 * 1024
MEMORY_BYTES = 512 * 1024 * 1024
MAX_OPEN_FILES = 64
WALL_FACTOR = 3.0

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """How a program ended. `problem` is empty when it ran to its end, whatever its exit status."""

    status: int | None  # exit status; negative: ended by that signal; None when its time was up
    output: str  # standard output, its beginning where it is too long
    errors: str  # standard error, its end
    problem: str  # "", "time", "memory" or "output"


def run_program(source: str, stdin: str, seconds: float, memory_bytes: int = MEMORY_BYTES) -> dict[str, Any]:
    """Run `source` as a program on `stdin`, for at most `seconds` of CPU time (rounded up) and WALL_FACTOR times that
    by the clock: on a crowded machine a program must not fail for its neighbours.

    Returns the fields of `ProgramRun`, as the fence passes JSON.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        Path(folder, "main.py").write_text(source, encoding="utf-8", errors="surrogatepass")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "main.py"],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: confine(seconds, memory_bytes),  # safe: the worker has one thread here
            start_new_session=True,
        )
        return asdict(_watch(process, stdin, WALL_FACTOR * seconds))


def _watch(process: subprocess.Popen[bytes], stdin: str, seconds: float) -> ProgramRun:
    """Feed and read the program until it ends; kill its whole process group in any case."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output, errors = _Reader(process.stdout, process), _Reader(process.stderr, process)
    feeder = threading.Thread(target=_feed, args=(process.stdin, stdin.encode(errors="replace")), daemon=True)
    feeder.start()
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    out, err = output.result(), errors.result()
    problem = ""
    if output.overflow or errors.overflow:
        problem = "output"
    elif status is None or status in (-signal.SIGXCPU, -signal.SIGKILL):
        problem = "time"
    elif status != 0 and "MemoryError" in err[-400:]:
        problem = "memory"
    return ProgramRun(status=status, output=out, errors=err[-2000:], problem=problem)


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, OSError), pipe:
        pipe.write(data)


class _Reader:
    """Reads a pipe in a thread up to a limit; a program that writes more is ended."""

    def __init__(self, pipe: IO[bytes], process: subprocess.Popen[bytes]) -> None:
        self.pipe, self.process = pipe, process
        self.data = bytearray()
        self.overflow = False
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while block := os.read(self.pipe.fileno(), 1 << 16):
            self.data += block
            if len(self.data) > MAX_OUTPUT_BYTES:
                self.overflow = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                return

    def result(self) -> str:
        self.thread.join(1.0)  # a process that escaped its group may hold the pipe: the fence kills it
        if not self.thread.is_alive():
            self.pipe.close()
        return bytes(self.data[:MAX_OUTPUT_BYTES]).decode(errors="replace")


def confine(seconds: float, memory_bytes: int) -> None:
    """Limits of the process that calls it and of all it starts; never raises, so that no program runs without them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    cpu = max(1, math.ceil(seconds))
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    deny_network_and_signals()
