"""A command that cannot outlive the process that started it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from slime_rl.engine import supervise

SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class SupervisedProcess:
    """Runs `argv` below `supervise.py`; output goes to `log_path`, temporary files to a folder that is removed after.

    Whatever happens to the owner (return, exception, kill -9), the command and all processes it started end within
    about a second. So do the files /dev/shm/`shm_prefix`* that it mapped. May be started again after it ended.
    Its methods may be called from any thread: who watches it may find its end while its owner stops it.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, shm_prefix: str = "") -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.log_path = log_path
        self.shm_prefix = shm_prefix
        self._process: subprocess.Popen[bytes] | None = None
        self._control_fd = -1
        self._scratch = ""
        self._exit_code: int | None = None
        self._lock = threading.RLock()  # of the end: two threads may meet it at once

    def start(self) -> None:
        """Start the command; the log file is written anew.

        Raises:
            RuntimeError: it runs already.
        """
        if self._process is not None:
            raise RuntimeError(f"{self.argv[0]} runs already as process {self._process.pid}")
        self._exit_code = None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.mkdtemp(prefix="slime_p_")  # short: Unix sockets below it have 107 characters
        read_fd, self._control_fd = os.pipe()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-S", "-E", "-s", supervise.__file__),
                        *(str(read_fd), str(os.getpid()), self._scratch, self.shm_prefix),
                        *self.argv,
                    ],
                    env={**self.env, "TMPDIR": self._scratch},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_fd,),
                    start_new_session=True,
                )
        finally:
            os.close(read_fd)

    @property
    def supervisor_pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def poll(self) -> int | None:
        """None while it runs, else the command's exit code (128 + signal when a signal ended it)."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._finish()
            return self._exit_code

    def is_running(self) -> bool:
        with self._lock:
            return self.poll() is None and self._process is not None

    def is_suspended(self) -> bool:
        """Whether one of its processes is stopped (SIGSTOP, a debugger), so that it neither works nor ends."""
        supervisor = self.supervisor_pid
        for pid in [] if supervisor is None else supervise.descendants(supervisor):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() in SUSPENDED:
                    return True
        return False

    def stop(self, grace_s: float = 5.0) -> int | None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when nothing is left, with the exit code. Idempotent."""
        with self._lock:
            if self._process is None:
                return self._exit_code
            with contextlib.suppress(BrokenPipeError):  # the supervisor has ended: _finish looks after the rest
                os.write(self._control_fd, f"stop {grace_s}\n".encode())
            try:
                self._process.wait(grace_s + 2 * supervise.KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the kernel kills the command with it
                self._process.wait()
            self._finish()
            return self._exit_code

    def tail(self, num_lines: int = 20) -> str:
        """The last lines of the log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - 200 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])

    def _finish(self) -> None:
        """The supervisor has ended: end what is left if it was killed, and give back what we hold."""
        assert self._process is not None
        code = self._process.returncode
        if code < 0:
            _kill_session(self._process.pid)
        os.close(self._control_fd)
        shutil.rmtree(self._scratch, ignore_errors=True)  # the supervisor removes it too: either may come first
        self._exit_code = 128 - code if code < 0 else code
        self._process = None


def _kill_session(session: int) -> None:
    """SIGKILL what the supervisor's session still holds, until it is empty."""
    deadline = time.monotonic() + supervise.KILL_LIMIT_S
    while time.monotonic() < deadline:
        left = [pid for pid, (_, member_of) in supervise.processes().items() if member_of == session]
        if not left:
            return
        for pid in left:
            supervise.send(pid, signal.SIGKILL)
        time.sleep(0.02)
