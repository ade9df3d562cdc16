"""Notices an event loop that stands still: one blocking call in a coroutine, and no deadline of any other works.

coroutine ──► time.sleep, requests.get, an endless loop        a thread beside the loop:  no beat for limit_s
                                                                  ──► says where, in a file, and ends the process
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

BLOCKED_FILE = "rollout_blocked.txt"
_EXIT_CODE = 70
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def watch_loop(limit_s: float, report: Path) -> None:
    """End this process once the running event loop has stood still for `limit_s`; `report` then says where.

    Nothing less helps: what blocks may be in C, where no exception reaches it.
    """
    report.unlink(missing_ok=True)
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    beat, pause_s = threading.Event(), min(1.0, limit_s / 4)

    def watch() -> None:
        stood_s = 0.0  # pauses, not the clock: this process may itself have been stopped for a while
        while True:
            beat.clear()
            try:
                loop.call_soon_threadsafe(beat.set)
            except RuntimeError:
                return  # the loop is closed
            stood_s = 0.0 if beat.wait(pause_s) else stood_s + pause_s
            if stood_s > limit_s and (frame := sys._current_frames().get(thread)) is not None:
                report.parent.mkdir(parents=True, exist_ok=True)
                report.write_text(_describe(frame, stood_s))
                os._exit(_EXIT_CODE)
            if stood_s == 0:
                time.sleep(pause_s)

    threading.Thread(target=watch, name="loop watch", daemon=True).start()


def _describe(frame: FrameType, stood_s: float) -> str:
    """One line: the innermost place that is in no library, for the user's own code is what blocks."""
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if not entry.filename.startswith(_LIBRARIES)] or stack
    place = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
    return (
        f"{place} has blocked all generation and scoring for {stood_s:.0f} s (--group-timeout-s); what waits must be "
        "awaited, or run in a thread by asyncio.to_thread"
    )
