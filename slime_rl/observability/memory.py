"""Peak host memory of a run: the driver and everything below it, Ray's processes and engines included.

Summed resident sizes (RSS) count a page that forked children share once per child, far too much for engines forked from
one parent. Linux tells the proportional size (PSS), which counts it once, but walks the page tables. So the cheap RSS
sum is watched about once a second and PSS is read as often as a small share of one core allows; in between, the RSS sum
is scaled by the last PSS/RSS ratio, so that a short peak is seen too. Where there is no PSS, RSS is used as it is.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1024**3
MAX_CPU_SHARE = 0.0015  # of one core, for RSS and for PSS each; pauses grow with what a reading costs


@dataclass(frozen=True, kw_only=True)
class TreeMemory:
    """Bytes of a process tree at one moment; `pss_bytes` takes a process's RSS where its PSS cannot be read."""

    rss_bytes: int
    pss_bytes: int
    num_processes: int


def process_tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants that are alive; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def measure_tree(pid: int) -> TreeMemory:
    """Memory of the tree now. Processes that end meanwhile count 0."""
    processes = process_tree(pid)
    sizes = [_rss(process) for process in processes]
    shares = [_pss(process.pid, rss) for process, rss in zip(processes, sizes, strict=True)]
    return TreeMemory(rss_bytes=sum(sizes), pss_bytes=sum(shares), num_processes=len(processes))


def measure_process(process: psutil.Process) -> int:
    """PSS of one process in bytes, its RSS where that cannot be read; 0 when it is gone."""
    return _pss(process.pid, _rss(process))


class PeakMemory:
    """Watches a process tree (this process's when `pid` is not given) from a background thread.

    with PeakMemory() as memory:
        ...
        memory.peak_gib
    """

    def __init__(self, pid: int | None = None, interval_s: float = 1.0) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._interval_s = interval_s
        self._peak_bytes = 0.0
        self._ratio = 1.0  # PSS / RSS at the last PSS reading
        self._next_pss_s = 0.0  # on the monotonic clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    @property
    def peak_gib(self) -> float:
        """Highest memory so far in GiB, this moment included."""
        self.sample()
        return self._peak_bytes / GIB

    def sample(self) -> None:
        """Look once now."""
        with self._lock:
            if time.monotonic() >= self._next_pss_s:
                self._sample_pss()
            else:
                rss = sum(_rss(process) for process in process_tree(self._pid))
                self._peak_bytes = max(self._peak_bytes, rss * self._ratio)

    def start(self) -> PeakMemory:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take a last sample and end the thread; calling it again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.sample()

    def __enter__(self) -> PeakMemory:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _sample_pss(self) -> None:
        begin = time.thread_time()
        memory = measure_tree(self._pid)
        cost_s = time.thread_time() - begin
        self._next_pss_s = time.monotonic() + cost_s / MAX_CPU_SHARE
        if memory.rss_bytes:
            self._ratio = memory.pss_bytes / memory.rss_bytes
        self._peak_bytes = max(self._peak_bytes, memory.pss_bytes)

    def _watch(self) -> None:
        while True:
            begin, pss_was_due_s = time.thread_time(), self._next_pss_s
            self.sample()
            cost_s = time.thread_time() - begin
            # A PSS reading has its own pause; only the cost of RSS readings lengthens this one.
            pause_s = cost_s / MAX_CPU_SHARE if self._next_pss_s == pss_was_due_s else 0.0
            if self._stop.wait(max(self._interval_s, pause_s)):
                return


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _pss(pid: int, rss: int) -> int:
    """Proportional set size from smaps_rollup, which the kernel adds up itself; `rss` where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # no Linux, another user's process, or it has just ended
        return rss
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), rss)
