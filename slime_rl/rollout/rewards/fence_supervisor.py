"""A process of its own between the run and code that may do anything.

    python -m slime_rl.rollout.rewards.fence_supervisor MEMORY_BYTES

Consumes requests on standard input and answers each on standard output; ends when its input does. The function runs in
a forked worker, which serves call after call until it hangs, dies, breaks a limit or leaves processes behind: then it
is killed with all its descendants, and the next call gets a fresh fork. It imports nothing but the standard library and
the modules that requests name: forking a small single-threaded process is cheap and safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from slime_rl.rollout.rewards import fence_worker
from slime_rl.rollout.rewards.fence_protocol import (
    MAX_ANSWER_BYTES,
    NONCE_BYTES,
    WITHDRAWN,
    DeadlineError,
    Failure,
    FrameError,
    folder_prefix,
    read_frame,
    write_frame,
)
from slime_rl.rollout.rewards.leftovers import scratch_folder
from slime_rl.rollout.rewards.process_tree import descendants, memory_of

MAX_PROCESSES = 16  # of one call; a fork bomb passes it within milliseconds
FIRST_TICK_S = 0.01  # a call that takes longer has its processes counted, now and every TICK_S
TICK_S = 0.05
SWEEP_S = 5.0  # longest time to hunt for what a call left behind
SWEEP_BATCH = 64
DYING_S = 0.001
# A live worker confirms a request in a millisecond, on a crowded machine in tens of them.
START_S = 2.0
FRESH_START_S = 30.0
PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE = 36, 4


@dataclass(frozen=True)
class Worker:
    """A forked child, the pipes to it and its folder, which is emptied when it is closed."""

    pid: int
    pidfd: int
    requests: int
    answers: int
    resources: contextlib.ExitStack  # its folder and the files above


class Supervisor:
    """See the module's text. `requests` and `answers` are file descriptors; `memory_bytes` limits each worker."""

    def __init__(self, requests: int, answers: int, memory_bytes: int) -> None:
        self.requests, self.answers, self.memory_bytes = requests, answers, memory_bytes
        self.owner = os.getppid()
        self.worker: Worker | None = None
        self.modules: set[str] = set()

    def serve(self) -> None:
        """Answer requests until the owner closes its end."""
        try:
            while (frame := read_frame(self.requests)) is not None:
                if frame != WITHDRAWN:  # else too late: it was answered meanwhile
                    write_frame(self.answers, self.answer(frame))
        except (BrokenPipeError, FrameError, OwnerGoneError):
            pass  # the owner died; `finally` ends the workers
        finally:
            self.end_worker()

    def answer(self, frame: bytes) -> bytes:
        header = json.loads(frame.partition(b"\n")[0])
        if (problem := self._load(header["module"], header["import_timeout_s"])) is not None:
            return failed(Failure.ERROR, problem)
        if not header["function"]:
            return b"{}"
        nonce = os.urandom(NONCE_BYTES)
        worker = self._started(nonce, frame)
        if worker is None:
            return failed(Failure.CRASH, "the worker did not start")
        answer, usable = self._wait(worker, nonce, time.monotonic() + header["timeout_s"])
        if not usable or self._has_more_processes_than(1):
            self.end_worker()
        return answer

    def _started(self, nonce: bytes, frame: bytes) -> Worker | None:
        """A worker that has confirmed that it works on this request; None when even a fresh one does not.

        The one that is there may be dead, have its files closed, or still be busy with a call whose answer was forged.
        """
        for _ in range(2):
            fresh = self.worker is None
            worker = self.worker = self.worker or self._fork()
            limit = time.monotonic() + (FRESH_START_S if fresh else START_S)
            try:
                write_frame(worker.requests, nonce + frame)
                if read_frame(worker.answers, limit, MAX_ANSWER_BYTES) == nonce:
                    return worker
            except (BrokenPipeError, FrameError):
                pass  # the same as a wrong confirmation: this worker is of no use
            self.end_worker()
        return None

    def _load(self, module: str, seconds: float) -> str | None:
        """Import a module here and call its `warm_up`, if it has one, so that workers are forked with what both made;
        a message when it cannot be."""
        if module in self.modules:
            return None
        try:
            with _import_limit(seconds):
                warm_up = getattr(importlib.import_module(module), "warm_up", None)
                if warm_up is not None:
                    warm_up()
        except TerminatedError:
            raise
        except BaseException as error:  # user code may raise anything at import, SystemExit too
            return f"cannot import {module}: {type(error).__name__}: {error}"
        self.modules.add(module)
        self.end_worker()
        return None

    def _wait(self, worker: Worker, nonce: bytes, deadline: float) -> tuple[bytes, bool]:
        """The worker's answer (or its failure), and whether it can serve another call."""
        poller = select.poll()
        poller.register(worker.answers, select.POLLIN)
        poller.register(worker.pidfd, select.POLLIN)
        poller.register(self.requests, select.POLLIN)
        tick = FIRST_TICK_S
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return failed(Failure.TIMEOUT, "the deadline passed"), False
            events = {fd for fd, _ in poller.poll(min(left, tick) * 1000)}
            tick = TICK_S
            if self.requests in events:
                if read_frame(self.requests) is None:
                    raise OwnerGoneError
                return failed(Failure.CRASH, "its caller withdrew it"), False  # nothing else comes before the answer
            if worker.answers in events:
                return self._read_answer(worker, nonce, deadline)
            if worker.pidfd in events:
                return failed(Failure.CRASH, "the process died"), False
            if not events and (failure := self._excess()) is not None:
                return failure, False

    def _read_answer(self, worker: Worker, nonce: bytes, deadline: float) -> tuple[bytes, bool]:
        try:
            content = read_frame(worker.answers, deadline, MAX_ANSWER_BYTES)
        except DeadlineError as error:
            return failed(Failure.TIMEOUT, str(error)), False
        except FrameError as error:
            return failed(Failure.CRASH, str(error)), False
        if content is None:
            return failed(Failure.CRASH, "the process died"), False
        if not content.startswith(nonce):
            return failed(Failure.CRASH, "the call wrote to the worker's files"), False
        content = content[NONCE_BYTES:]
        # A worker that ran out of memory may be fragmented or half-broken.
        return content, not content.startswith(fence_worker.OUT_OF_MEMORY)

    def _fork(self) -> Worker:
        request_out, request_in = os.pipe()
        answer_out, answer_in = os.pipe()
        stack = contextlib.ExitStack()
        folder = stack.enter_context(scratch_folder(folder_prefix(os.getpid())))
        folder.chmod(0o711)  # programs that run as another user have folders in it
        pid = os.fork()
        if pid == 0:
            for fd in (request_in, answer_out, self.requests, self.answers):
                os.close(fd)
            fence_worker.run(request_out, answer_in, self.memory_bytes, self.owner, folder)
        os.close(request_out)
        os.close(answer_in)
        worker = Worker(pid, os.pidfd_open(pid), request_in, answer_out, stack)
        for fd in (worker.pidfd, worker.requests, worker.answers):
            stack.callback(os.close, fd)
        return worker

    def end_worker(self) -> None:
        """Kill the worker and all its descendants: as subreaper we inherit those that were orphaned on purpose."""
        if self.worker is None:
            return
        worker = self.worker
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        limit, before = time.monotonic() + SWEEP_S, [worker.pid]
        while (left := descendants(os.getpid(), SWEEP_BATCH)) and time.monotonic() < limit:
            if left == before:  # they are dying, for which they need a CPU that we, being ahead of them, would keep
                time.sleep(DYING_S)
            before = left
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    if os.getpgid(pid) != os.getpgrp():  # at once, where it made a group of its own and forks in it
                        os.killpg(os.getpgid(pid), signal.SIGKILL)
            self._reap()
        worker.resources.close()
        self.worker = None  # last: whoever interrupts us goes on where we were

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _excess(self) -> bytes | None:
        """The failure of a call whose processes together are too many or too large."""
        below = descendants(os.getpid(), MAX_PROCESSES + 1)
        if len(below) > MAX_PROCESSES:
            return failed(Failure.PROCESSES, f"more than {MAX_PROCESSES} processes")
        limit = self.memory_bytes + memory_of([os.getpid()], 0)  # the worker begins with what is loaded here
        if memory_of(below, limit) > limit:
            return failed(Failure.MEMORY, f"its processes together have more than {self.memory_bytes >> 20} MiB")
        return None

    def _has_more_processes_than(self, limit: int) -> bool:
        # Never count further than needed: a fork bomb grows faster than it can be counted.
        return len(descendants(os.getpid(), limit + 1)) > limit


class OwnerGoneError(Exception):
    """The other end of our input was closed while a call ran."""


def failed(kind: Failure, message: str) -> bytes:
    return json.dumps({"failure": kind, "message": message}).encode()


class TerminatedError(SystemExit):
    """We were told to end."""


class ImportTimeoutError(BaseException):
    """No Exception: a module that catches those while it is imported must not go on."""


def _terminate(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off the tidying
    raise TerminatedError(0)


@contextlib.contextmanager
def _import_limit(seconds: float) -> Iterator[None]:
    """Interrupt what runs inside after that time. What hangs in compiled code is ended by our owner, with us."""

    def interrupt(*_: object) -> NoReturn:
        raise ImportTimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stay_ahead() -> None:
    """Run before whatever a call starts: among thousands of forked processes we would not get the turn to kill them.

    Real-time where that is allowed (root, for whom RLIMIT_NPROC does not count); it is not inherited by the workers.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def main() -> NoReturn:
    stay_ahead()
    signal.signal(signal.SIGTERM, _terminate)  # leave through `serve`, which ends the workers
    # Our standard streams are the protocol; whatever prints must not reach them.
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:  # programs of the same user must not read requests in our memory, nor in a worker's
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    Supervisor(requests, answers, int(sys.argv[1])).serve()
    sys.exit(0)


if __name__ == "__main__":
    main()
