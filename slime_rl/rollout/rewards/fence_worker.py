"""The process that runs fenced functions, forked by a supervisor; it may be killed at any moment."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from slime_rl.rollout.rewards import landlock
from slime_rl.rollout.rewards.fence_protocol import NONCE_BYTES, Failure, read_frame, write_frame
from slime_rl.rollout.rewards.seccomp import deny_signals_to

OUT_OF_MEMORY = b'{"failure": "memory"'
MAX_FILE_BYTES = 64 * 1024 * 1024
PR_SET_PDEATHSIG = 1
MAX_MESSAGE_LENGTH = 500
NICENESS = 5  # below the supervisor, which must get its turn beside a fork bomb to end it


def run(requests: int, answers: int, memory_bytes: int, owner: int, folder: Path) -> NoReturn:
    """Serve calls until the supervisor closes `requests`. Never returns into the supervisor's code. `owner` is the
    process that the supervisor works for, `folder` for temporary files; the supervisor removes it."""
    status = 1
    try:
        confine(memory_bytes, owner)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        while (frame := read_frame(requests)) is not None:
            nonce, request = frame[:NONCE_BYTES], frame[NONCE_BYTES:]
            write_frame(answers, nonce)
            write_frame(answers, nonce + answer(request))
        status = 0
    finally:
        os._exit(status)


def confine(memory_bytes: int, owner: int) -> None:
    """A process group of its own, death with the supervisor, no output, limits on memory and file size, no signals to
    supervisor and owner, nor to all processes at once; with Landlock, to nothing but what it starts."""
    supervisor = os.getppid()
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(NICENESS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # 16 layers are there already
        landlock.keep_signals()
    with contextlib.suppress(OSError):  # not to be had here: a supervisor that was killed is started again
        deny_signals_to([-1, supervisor, -os.getpgid(supervisor), owner, -os.getpgid(owner)])


def answer(frame: bytes) -> bytes:
    """Run the function that a request names; its value, or how it failed, as JSON."""
    try:
        head, _, payload = frame.partition(b"\n")
        header = json.loads(head)
        function: Any = importlib.import_module(header["module"])
        for part in header["function"].split("."):
            function = getattr(function, part)
        value = function(*pickle.loads(payload))
        return json.dumps({"value": value}).encode()
    except MemoryError:
        return OUT_OF_MEMORY + b', "message": "over its memory limit"}'
    except BaseException as error:  # SystemExit and KeyboardInterrupt raised by a reward end the call, not the worker
        message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_LENGTH]
        return json.dumps({"failure": Failure.ERROR, "message": message}).encode()


if __name__ == "__main__":
    sys.exit("fenced workers are forked by slime_rl.rollout.rewards.fence_supervisor")
