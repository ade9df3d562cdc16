"""Runs a Python program that nobody trusts: a fresh interpreter with hard limits, no network and a folder of its own.

It is meant to be called inside the process fence, which adds a deadline, a limit on memory and number of all processes
of the call, and the hunt for processes left behind:

    reward or tool ──► ProcessFence ──► worker: run_program ──► python -I main.py (limits, user, Landlock, seccomp)

What the program cannot do: use more than its CPU seconds or memory, write a large file, open a network socket, signal
or trace other processes or change their limits. Where the kernel has Landlock it reads only the interpreter with its
packages and the system's files, and writes only in its folder and in /dev/shm. See docs/rewards.md.
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
import sysconfig
import threading
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from slime_rl.rollout.rewards import landlock, own_user, seccomp
from slime_rl.rollout.rewards.leftovers import remove_files_of, scratch_folder
from slime_rl.rollout.rewards.sandbox_examiner import Examiner

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
MAX_FILE_BYTES = 16 * 1024 * 1024
MEMORY_BYTES = 512 * 1024 * 1024
MAX_OPEN_FILES = 64
MAX_THREADS = 512  # of all processes of the program together, where it has a user of its own
WALL_FACTOR = 3.0

_ERRORS_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1
_SYSTEM = tuple(
    map(Path, ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/nix", "/sys/devices"))
)
_SYSTEM_FILES = tuple(map(Path, ("/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/dev/urandom", "/dev/random")))
_WRITABLE = (Path("/dev/null"), Path("/dev/zero"), Path("/dev/full"), Path("/dev/shm"))  # shm: locks of multiprocessing


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """How a program ended. `problem` is empty when it ran to its end, whatever its exit status."""

    status: int | None  # exit status; negative: ended by that signal; None when its time was up
    output: str  # standard output, its beginning where it is too long
    errors: str  # standard error, its end
    problem: str  # "", "time", "memory" or "output"
    passed: bool  # the end of `check` was reached


def run_program(
    source: str,
    stdin: str,
    seconds: float,
    memory_bytes: int = MEMORY_BYTES,
    *,
    check: str | None = None,
    output_bytes: int = MAX_OUTPUT_BYTES,
) -> dict[str, Any]:
    """Run `source` as a program on `stdin`, for at most `seconds` of CPU time (rounded up) and WALL_FACTOR times that
    by the clock: on a crowded machine a program must not fail for its neighbours. With `check` it runs as a module
    named `main`, and then those statements in its names.

    Returns the fields of `ProgramRun`, as the fence passes JSON.
    """
    with scratch_folder("sandbox-") as outer:
        folder = outer / "own"  # the program may rename or remove it, but not the outer one if it is another user's
        folder.mkdir()
        main = folder / "main.py"
        main.write_text(source, encoding="utf-8", errors="surrogatepass")
        needed = (*interpreter(), outer)
        user = own_user.number_for(needed)
        if user is not None:
            outer.chmod(0o711)
            os.chown(folder, user, user)
            os.chown(main, user, user)
        try:
            return asdict(_run(folder, stdin, seconds, memory_bytes, check, output_bytes, user))
        finally:
            if user is not None:
                remove_files_of(user)


def _run(
    folder: Path,
    stdin: str,
    seconds: float,
    memory_bytes: int,
    check: str | None,
    output_bytes: int,
    user: int | None,
) -> ProgramRun:
    with contextlib.ExitStack() as stack:
        examiner = None if check is None else stack.enter_context(Examiner(check))
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", *(examiner.command if examiner is not None else ["main.py"])],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: confine(folder, seconds, memory_bytes, user),  # safe: it starts no thread, takes no lock
            pass_fds=examiner.of_program if examiner is not None else (),
            start_new_session=True,
        )
        if examiner is not None:
            examiner.start()
        return _watch(process, stdin, WALL_FACTOR * seconds, output_bytes, examiner)


def _environment(folder: Path) -> dict[str, str]:
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}  # else memory for each CPU
    return {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8", **one_thread}


def _watch(
    process: subprocess.Popen[bytes], stdin: str, seconds: float, output_bytes: int, examiner: Examiner | None
) -> ProgramRun:
    """Feed and read the program until it ends; kill its whole process group in any case."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output = _Reader(process.stdout, process, output_bytes)
    errors = _Reader(process.stderr, process, _ERRORS_BYTES, keep_end=True)
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
    if output.overflow:
        problem = "output"
    elif status is None or status in (-signal.SIGXCPU, -signal.SIGKILL):
        problem = "time"
    elif status != 0 and "MemoryError" in err[-400:]:
        problem = "memory"
    passed = examiner is not None and examiner.passed() and status == 0
    return ProgramRun(status=status, output=out, errors=err[-2000:], problem=problem, passed=passed)


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, OSError), pipe:
        pipe.write(data)


class _Reader:
    """Reads a pipe in a thread up to a limit; a program that writes more is ended, or with `keep_end` the earlier part
    is forgotten."""

    def __init__(
        self, pipe: IO[bytes], process: subprocess.Popen[bytes], limit: int, *, keep_end: bool = False
    ) -> None:
        self.pipe, self.process, self.limit, self.keep_end = pipe, process, limit, keep_end
        self.data = bytearray()
        self.overflow = False
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while block := os.read(self.pipe.fileno(), 1 << 16):
            self.data += block
            if len(self.data) <= self.limit:
                continue
            if self.keep_end:
                del self.data[: -self.limit]
                continue
            self.overflow = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return

    def result(self) -> str:
        self.thread.join(1.0)  # a process that escaped its group may hold the pipe: the fence kills it
        if not self.thread.is_alive():
            self.pipe.close()
        return bytes(self.data[: self.limit]).decode(errors="replace")


def confine(folder: Path, seconds: float, memory_bytes: int, user: int | None) -> None:
    """Limits of the process that calls it and of all it starts. What it raises keeps the program from being run."""
    libc = ctypes.CDLL(None, use_errno=True)
    cpu = max(1, math.ceil(seconds))
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    needed = interpreter()
    if user is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_THREADS, MAX_THREADS))
        own_user.become(user, (*needed, folder.parent))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which takes it away
    landlock.restrict((*_SYSTEM, *_SYSTEM_FILES, *needed), (*_WRITABLE, folder))
    seccomp.confine_program(signals=user is not None or landlock.keeps_signals())


@cache
def interpreter() -> tuple[Path, ...]:
    """Where the interpreter, its library and the packages beside it are."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = {Path(sys.executable), Path(sys.prefix), Path(sys.base_prefix), *map(Path, folders)}
    return tuple(sorted(path for path in paths if path.exists()))
