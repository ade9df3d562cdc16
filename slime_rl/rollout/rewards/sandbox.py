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
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

MAX_OUTPUT_BYTES = 64 * 1024
MAX_FILE_BYTES = 16 * 1024 * 1024
MEMORY_BYTES = 512 * 1024 * 1024
MAX_OPEN_FILES = 64
WALL_FACTOR = 3.0

# System calls that are refused, by machine: socket (other than AF_UNIX), and always ptrace, process_vm_writev, kill,
# tkill, tgkill, pidfd_send_signal, io_uring_setup (which could open sockets on its own).
_SYSCALLS = {
    "x86_64": (0xC000003E, 41, (101, 311, 62, 200, 234, 424, 425)),
    "aarch64": (0xC00000B7, 198, (117, 271, 129, 130, 131, 424, 425)),
}
_AF_UNIX = 1
_X32 = 0x40000000
_EPERM = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_PR_SET_PDEATHSIG = 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


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
    deny_network_and_signals(libc)


def deny_network_and_signals(libc: Any) -> None:
    """A seccomp filter, which needs no privilege and cannot be taken off again. Raises OSError where it is refused."""
    machine = platform.machine()
    if machine not in _SYSCALLS:
        raise OSError(f"no table of system calls for {machine!r}: programs cannot be kept from the network here")
    arch, socket, always = _SYSCALLS[machine]
    code = _filter(arch, socket, always)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")


def _filter(arch: int, socket: int, always: tuple[int, ...]) -> bytes:
    """BPF: another architecture or a call in `always` is refused; `socket` is, unless its domain is AF_UNIX."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    number, architecture, first_argument = 0, 4, 16  # offsets in struct seccomp_data

    def op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    refuse = op(give, _ERRNO | _EPERM)
    lines = [op(load, architecture), op(equal, arch, 1, 0), refuse, op(load, number)]
    lines += [op(at_least, _X32, 0, 1), refuse]  # the same calls under other numbers
    for call in always:
        lines += [op(equal, call, 0, 1), refuse]
    lines += [op(equal, socket, 1, 0), op(give, _ALLOW)]
    lines += [op(load, first_argument), op(equal, _AF_UNIX, 1, 0), refuse, op(give, _ALLOW)]
    return b"".join(lines)
