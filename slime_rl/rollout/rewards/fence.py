"""Calls that may hang, crash or eat memory, in processes that can be killed without harm to the run.

    reward ──call──► ProcessFence ──thread──► supervisor process ──fork──► worker process: runs the function
                        (counts)                 (deadline, kill, sweep)      (memory limit)

The supervisor imports the function's module once and forks workers from there, so that replacing a killed one takes
milliseconds. A supervisor ends, with all below it, when its owner's end of the pipe closes: no orphans after kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime_rl.rollout.rewards.fence_protocol import (
    WITHDRAWN,
    Failure,
    FrameError,
    folder_prefix,
    read_frame,
    write_frame,
)
from slime_rl.rollout.rewards.leftovers import remove_scratch_folders
from slime_rl.rollout.together import together

GIB = 1024**3
IMPORT_TIMEOUT_S = 180.0  # for the first call of a module; sympy takes a second, on a busy machine ten or twenty
GRACE_S = 5.0  # a supervisor that has not answered this long after its deadline is itself dead

_current: ContextVar[ProcessFence] = ContextVar("process_fence")


@dataclass(frozen=True, kw_only=True)
class FenceAnswer:
    """What came of one call: a value, or the kind of failure with a message."""

    value: Any = None
    failure: Failure | None = None
    message: str = ""

    def score_dict(self) -> dict[str, Any]:
        """As a reward value: the score that was returned, or 0 with the failure noted."""
        if self.failure is None:
            return {"score": float(self.value)}
        return {"score": 0.0, "failure": str(self.failure), "failure_message": self.message}


class ProcessFence:
    """A pool of supervised workers. Processes start at the first call; `close` (or leaving the context) ends them.

    Functions are named as "package.module:function", take positional arguments that can be pickled, and return what
    JSON can hold. Safe to use from any thread and event loop.
    """

    def __init__(self, num_workers: int, timeout_s: float, *, memory_bytes: int = 2 * GIB) -> None:
        """`timeout_s` is the default deadline of a call; `memory_bytes` a worker may allocate on top of its imports,
        and the processes of a call together."""
        if num_workers < 1 or timeout_s <= 0 or memory_bytes <= 0:
            raise ValueError(
                "a fence needs num_workers >= 1, timeout_s > 0 and memory_bytes > 0, got "
                f"{num_workers}, {timeout_s} and {memory_bytes}"
            )
        self.timeout_s = timeout_s
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._supervisors = [_Supervisor(memory_bytes, self._closed) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Supervisor] = queue.SimpleQueue()
        for supervisor in self._supervisors:
            self._idle.put(supervisor)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="fence")

    async def call(self, function: str, *args: Any, timeout_s: float | None = None) -> FenceAnswer:
        """Run one function; failures come back as answers, never as exceptions.

        The deadline starts when a worker starts on it, not while it waits for one. Cancelling the call ends its worker,
        with all that it started; it is not counted.
        """
        seconds = self.timeout_s if timeout_s is None else timeout_s
        withdrawal = _Withdrawal()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._run, function, args, seconds, withdrawal)
        except asyncio.CancelledError:
            withdrawal.withdraw()
            raise

    async def call_many(
        self, function: str, calls: Sequence[tuple[Any, ...]], timeout_s: float | None = None
    ) -> list[FenceAnswer]:
        """One answer per argument tuple, in order; each call has its own deadline and its own fate."""
        return await together(self.call(function, *args, timeout_s=timeout_s) for args in calls)

    def prewarm(self, *modules: str) -> None:
        """Start every process and import `modules` there, in the background; calls made meanwhile wait for it."""
        for supervisor in self._supervisors:
            threading.Thread(target=supervisor.load, args=(modules,), name="fence-prewarm", daemon=True).start()

    def counts(self) -> dict[str, int]:
        """Calls so far as `calls`, and the failed ones among them by kind (every kind is present)."""
        with self._lock:
            return {name: self._counts[name] for name in ("calls", *Failure)}

    def metrics(self) -> dict[str, float]:
        """The counts under the names that a run logs: rewards/calls, rewards/timeouts, rewards/crashes, ..."""
        return {f"rewards/{_PLURAL.get(name, name)}": float(count) for name, count in self.counts().items()}

    def close(self) -> None:
        """End every process; calls still running come back as crashed. May be called twice."""
        self._closed.set()
        for supervisor in self._supervisors:
            supervisor.terminate()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for supervisor in self._supervisors:
            supervisor.discard()

    def __enter__(self) -> ProcessFence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, function: str, args: tuple[Any, ...], seconds: float, withdrawal: _Withdrawal) -> FenceAnswer:
        supervisor = self._idle.get()  # as many threads as supervisors: never waits for long
        try:
            answer = supervisor.call(function, args, seconds, withdrawal)
        finally:
            self._idle.put(supervisor)
        if withdrawal.made:
            return answer  # nobody has it
        with self._lock:
            self._counts["calls"] += 1
            if answer.failure is not None:
                self._counts[answer.failure] += 1
        return answer


_PLURAL = {"timeout": "timeouts", "crash": "crashes", "memory": "memory_failures", "error": "errors"}


class _Withdrawal:
    """Whether the caller of one call has gone; if so, its supervisor is told once, while it works on that call."""

    def __init__(self) -> None:
        self.made = False
        self._lock = threading.Lock()  # a caller may go at the moment when the answer comes
        self._supervisor: int | None = None  # its input, from the whole request written until the answer is read

    def withdraw(self) -> None:
        with self._lock:
            self.made = True
            self._tell()

    @contextlib.contextmanager
    def told_to(self, supervisor: int) -> Iterator[None]:
        with self._lock:
            self._supervisor = supervisor
            if self.made:
                self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._supervisor = None

    def _tell(self) -> None:
        if self._supervisor is not None:
            with contextlib.suppress(OSError):  # it is dead
                write_frame(self._supervisor, WITHDRAWN)


class _Supervisor:
    """The owner's side of one supervisor process, started when first needed and again after it died."""

    def __init__(self, memory_bytes: int, closed: threading.Event) -> None:
        self.memory_bytes = memory_bytes
        self.closed = closed
        self.process: subprocess.Popen[bytes] | None = None
        self.turn = threading.Lock()  # one request at a time; prewarm and calls come from different threads
        self.life = threading.Lock()  # starting and killing

    def call(self, function: str, args: tuple[Any, ...], seconds: float, withdrawal: _Withdrawal) -> FenceAnswer:
        module, colon, name = function.partition(":")
        if not colon:
            raise ValueError(f"a fenced function is named package.module:function, got {function!r}")
        header = {"module": module, "function": name, "timeout_s": seconds, "import_timeout_s": IMPORT_TIMEOUT_S}
        with self.turn:
            return self._ask(header, pickle.dumps(args), seconds + IMPORT_TIMEOUT_S + GRACE_S, withdrawal)

    def load(self, modules: Sequence[str]) -> None:
        for module in modules:
            with self.turn:
                header = {"module": module, "function": "", "timeout_s": 0.0, "import_timeout_s": IMPORT_TIMEOUT_S}
                self._ask(header, b"", IMPORT_TIMEOUT_S + GRACE_S, _Withdrawal())

    def _ask(self, header: dict[str, Any], payload: bytes, seconds: float, withdrawal: _Withdrawal) -> FenceAnswer:
        try:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            write_frame(process.stdin.fileno(), json.dumps(header).encode() + b"\n" + payload)
            with withdrawal.told_to(process.stdin.fileno()):
                frame = read_frame(process.stdout.fileno(), time.monotonic() + seconds)
        except (OSError, FrameError) as error:
            self._discard()
            return FenceAnswer(failure=Failure.CRASH, message=f"no answer from the supervisor: {error}")
        if frame is None:
            self._discard()
            return FenceAnswer(failure=Failure.CRASH, message="the supervisor died")
        return decode_answer(frame)

    def _started(self) -> subprocess.Popen[bytes]:
        with self.life:
            if self.closed.is_set():
                raise OSError("the fence is closed")
            if self.process is None:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "slime_rl.rollout.rewards.fence_supervisor", str(self.memory_bytes)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=_environment(),
                    bufsize=0,
                    start_new_session=True,  # its own group: neither Ctrl-C nor our own signals reach it by chance
                )
            return self.process

    def terminate(self) -> None:
        """End the process while a request may run. On SIGTERM it kills its workers; if it does not listen, so do we."""
        with self.life:
            process = self.process
            if process is None:
                return
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def discard(self) -> None:
        """End the process when the request that runs has come back."""
        with self.turn:
            self._discard()

    def _discard(self) -> None:
        self.terminate()
        with self.life:
            process, self.process = self.process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        remove_scratch_folders(folder_prefix(process.pid))  # where it was killed itself


def decode_answer(frame: bytes) -> FenceAnswer:
    """A worker's JSON answer; anything that is not one is a crash of that worker (user code may write to any file)."""
    try:
        answer = json.loads(frame)
        failure = Failure(answer["failure"]) if "failure" in answer else None
        return FenceAnswer(value=answer.get("value"), failure=failure, message=str(answer.get("message", "")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return FenceAnswer(failure=Failure.CRASH, message=f"unreadable answer: {error}")


def _environment() -> dict[str, str]:
    """The environment of fenced processes: no GPU, one thread, and our import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def current_fence() -> ProcessFence:
    """The fence of the rollout that calls us.

    Raises:
        LookupError: no owner has set one with `use_fence`.
    """
    try:
        return _current.get()
    except LookupError:
        raise LookupError("no process fence here: call the reward within `with use_fence(fence):`") from None


@contextlib.contextmanager
def use_fence(fence: ProcessFence) -> Iterator[None]:
    """Make `fence` the current one for this context and the tasks started in it; its owner still closes it."""
    token = _current.set(fence)
    try:
        yield
    finally:
        _current.reset(token)
