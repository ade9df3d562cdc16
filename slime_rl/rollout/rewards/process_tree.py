"""Processes below a process, and their memory, from /proc."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int, at_most: int) -> list[int]:
    """Processes below `pid`, parents before children; stops looking when it has found `at_most`."""
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) < at_most:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found[:at_most]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in _listed(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return children


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return []


def memory_of(pids: Iterable[int], worth_a_look: int) -> int:
    """Bytes that these processes have in memory together. Where a first sum is above `worth_a_look`, pages that several
    of them share (after a fork) are counted once, which takes milliseconds for large ones."""
    pids = list(pids)
    resident = sum(map(_resident, pids))
    return resident if resident <= worth_a_look else sum(map(_proportional, pids))


def _resident(pid: int) -> int:
    """Pages of its own and those shared by fork; no files that it maps."""
    try:
        _, resident, of_files, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(of_files)) * resource.getpagesize()


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:  # a worker of a user who is not root, see PR_SET_DUMPABLE
        return _resident(pid)
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
