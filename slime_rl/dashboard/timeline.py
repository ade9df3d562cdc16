"""A window of the timeline of --trace, out of files that may be far larger than memory.

Each process appends its spans when they end, so the ends rise within a file, and a window is found by bisection.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from slime_rl.dashboard.line_file import LineFile
from slime_rl.observability.trace import Span, assign_lanes, read_span

MAX_SPANS = 6000  # of one process in one window; more than a page can draw at once
MAX_LANES = 8  # overlapping spans beyond that are shown as how many there are at a time
MAX_POINTS = 600
SMALLEST_GAP = 0.002  # of the window; shorter pauses are not visible
STEPS_SHOWN = 3  # the window when none is asked for
NO_STEP_S = 60.0  # its length in a run without steps
# A span is written when it ends: one that is longer than the window may come after it, this far in the file.
READ_ON_S, READ_ON_LINES = 30.0, 5000
_CHUNK = 1 << 16


class Timeline:
    """RUN_DIR/trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._steps: dict[Path, LineFile[tuple[int, float, float]]] = {}

    def files(self) -> list[Path]:
        """The driver's first, then those of trainers and engines, then the others."""
        order = {"driver": 0, "trainer": 1, "critic": 2, "engine": 3}
        return sorted(self.folder.glob("*.jsonl"), key=lambda p: (order.get(p.stem.split("_")[0], 4), len(p.stem), p))

    def steps(self) -> dict[int, tuple[float, float]]:
        """Training step -> from the end of the step before to its own end, by the clock of the first trainer."""
        trainers = [path for path in self.files() if path.stem.startswith("trainer")]
        if not trainers:
            return {}
        file = self._steps.setdefault(trainers[0], LineFile(trainers[0], _step_of))
        found: dict[int, tuple[float, float]] = {}
        before: float | None = None
        for step, start, end in file.look():
            if step >= 0:
                found[step] = (start if before is None else before, end)
                before = end
        return found

    def window(self, step: int | None = None, between: tuple[float, float] | None = None) -> dict[str, Any]:
        """Tracks between two times, in seconds since the first span; else around a step; else the newest steps."""
        files = self.files()
        starts = [span["start"] for path in files if (span := _first_span(path)) is not None]
        steps = self.steps()
        if not starts:
            return {"tracks": [], "steps": [], "from": 0.0, "to": 0.0}
        zero = min(starts)
        if between is not None:
            start, end = zero + between[0], zero + max(between[1], between[0] + 1e-3)
        elif step is not None and step in steps:
            start, end = steps[step]
        elif steps:
            newest = sorted(steps)[-STEPS_SHOWN:]
            start, end = steps[newest[0]][0], steps[newest[-1]][1]
        else:
            end = max(_last_end(path) for path in files)
            start = max(zero, end - NO_STEP_S)
        marks = [[number, t - zero] for number, (_, t) in steps.items() if start <= t <= end]
        tracks = [track for path in files for track in _tracks(path, start, end, zero)]
        return {"tracks": tracks, "steps": sorted(steps), "marks": marks, "from": start - zero, "to": end - zero}


def _tracks(path: Path, start: float, end: float, zero: float) -> list[dict[str, Any]]:
    spans, is_cut = spans_between(path, start, end)
    found = []
    for name in dict.fromkeys(span["track"] for span in spans):
        placed = assign_lanes(span for span in spans if span["track"] == name)
        gaps = idle_gaps([(span["start"], span["end"]) for _, span in placed], start, end)
        idle = sum(high - low for low, high in gaps)
        track: dict[str, Any] = {
            "process": path.stem,
            "track": name,
            "count": len(placed),
            "is_cut": is_cut,
            "busy": 1 - idle / (end - start),
            "gaps": [[a - zero, b - zero] for a, b in gaps if b - a > SMALLEST_GAP * (end - start)],
        }
        if max(lane for lane, _ in placed) >= MAX_LANES:
            track["at_once"] = _at_once([span for _, span in placed], start, end, zero)
        else:
            track["bars"] = [[ln, s["start"] - zero, s["end"] - zero, s["name"], s.get("args", {})] for ln, s in placed]
        found.append(track)
    return found


def spans_between(path: Path, start: float, end: float) -> tuple[list[Span], bool]:
    """(spans that reach into the window, by start; whether there were more than MAX_SPANS)."""
    found: list[Span] = []
    beyond = 0
    with path.open("rb") as file:
        file.seek(_bisect(file, path.stat().st_size, start))
        for line in file:
            span = read_span(line)
            if span is None or span["end"] < start:
                continue
            if span["start"] <= end:
                found.append(span)
            beyond += span["end"] > end
            if len(found) > MAX_SPANS or (beyond > READ_ON_LINES and span["end"] > end + READ_ON_S):
                break
    return sorted(found[:MAX_SPANS], key=lambda span: span["start"]), len(found) > MAX_SPANS


def _bisect(file: BinaryIO, size: int, start: float) -> int:
    """Offset of a line shortly before the first that ends at `start` or later."""
    low, high = 0, size
    while high - low > _CHUNK:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        span = read_span(file.readline())
        if span is None or span["end"] >= start:
            high = middle
        else:
            low = middle
    if low == 0:
        return 0
    file.seek(low)
    file.readline()
    return file.tell()


def idle_gaps(bars: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """Parts of the window that no bar covers; `bars` by start."""
    gaps, busy_until = [], start
    for low, high in bars:
        if low > busy_until:
            gaps.append((busy_until, min(low, end)))
        busy_until = max(busy_until, high)
    if busy_until < end:
        gaps.append((busy_until, end))
    return gaps


def _at_once(spans: list[Span], start: float, end: float, zero: float) -> list[list[float]]:
    """[time, most spans at a time until the next point] over the window."""
    changes = sorted([(s["start"], 1) for s in spans] + [(s["end"], -1) for s in spans])
    width, points, now, at = (end - start) / MAX_POINTS, [], 0, 0
    for i in range(MAX_POINTS):
        most = now
        while at < len(changes) and changes[at][0] <= start + (i + 1) * width:
            now += changes[at][1]
            most, at = max(most, now), at + 1
        points.append([start + i * width - zero, most])
    return points


def _first_span(path: Path) -> Span | None:
    """The span of the first line; others may have begun a little earlier, and are drawn from there."""
    with path.open("rb") as file:
        return read_span(file.readline())


def _last_end(path: Path) -> float:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _CHUNK))
        return max((span["end"] for line in file if (span := read_span(line)) is not None), default=0.0)


def _step_of(line: bytes, _: int) -> tuple[int, float, float]:
    """(step, start, end) of a trainer's line; the step is -1 for spans of parts of a step."""
    if b'"steps"' not in line:
        return -1, 0.0, 0.0
    span = read_span(line)
    if span is None:
        raise ValueError(f"must be a span, got {line[:80]!r}")
    name = span["name"]
    step = int(name.removeprefix("step ")) if name.startswith("step ") and name[5:].isdigit() else -1
    return step, span["start"], span["end"]
