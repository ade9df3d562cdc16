"""Waiting for what happens elsewhere, and whether processes run: for tests on a machine that may be busy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

LIMIT_S = 120.0  # of what takes a moment on a quiet machine; only a fault lasts longer


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return once `condition` holds. Raises AssertionError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {limit_s:g} s"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may go between the two halves of a look
        return ""


def command_lines(root: int) -> list[str]:
    """Of the processes below `root` that are there long enough to be asked."""
    lines = []
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


def running(pids: Iterable[int]) -> list[int]:
    """Those that run; a zombie, which only waits for its parent, does not."""
    return [pid for pid in pids if state_of(pid) not in ("", "Z", "X")]
