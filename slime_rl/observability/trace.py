"""A timeline of the run for Perfetto (ui.perfetto.dev) or chrome://tracing: `--trace`.

Each process appends its spans to a file of its own, RUN_DIR/trace/PROCESS.jsonl; `write_trace` makes RUN_DIR/trace.json
of them when the run ends. For a run that was killed:

    python -m slime_rl.observability.trace RUN_DIR

A span costs a few microseconds, a line on disk, and no waiting for anyone. Clocks are the machines' own, so spans of
different nodes are apart by what their clocks are.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from slime_rl.config import Config
from slime_rl.observability.metrics import as_number

FOLDER = "trace"
TRACE_FILE = "trace.json"
Span = dict[str, Any]
FLUSH_S = 0.5  # a killed run loses at most what happened in the last half second


class Trace:
    """Where one process writes its spans; without a path it writes nothing and costs next to nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_torn = _is_torn(path)
            self._file = path.open("a", encoding="utf-8", buffering=1 << 16)
            self._file.write("\n" * is_torn)
        self._flushed = time.monotonic()

    @contextmanager
    def span(self, track: str, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """The block as one bar named `name` in the lane `track`; more details may be put into what it yields.

        Spans of one track may overlap: those are drawn in lanes below each other.
        """
        if self._file is None:
            yield details
            return
        start = time.time()
        try:
            yield details
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            self.add(track, name, start, time.time(), details)

    def add(self, track: str, name: str, start_s: float, end_s: float, details: dict[str, Any] | None = None) -> None:
        """A span that is over; times are seconds since the epoch."""
        if self._file is None:
            return
        line = {"track": track, "name": name, "start": start_s, "end": end_s, "args": details or {}}
        self._file.write(json.dumps(line, default=str) + "\n")
        now = time.monotonic()
        if now - self._flushed > FLUSH_S:
            self.flush()
            self._flushed = now

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_torn(path: Path) -> bool:
    """Whether the process before us was killed in the middle of a line; ours must not be lost with it."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


NO_TRACE = Trace()


def open_trace(config: Config, process: str) -> Trace:
    """The trace of a process of this run; one that writes nothing without --trace."""
    return Trace(config.run_dir / FOLDER / f"{process}.jsonl") if config.logging.trace else Trace()


class PhaseTrace:
    """Turns the driver's phase begin and end (`PhaseTimer.on_phase`) into spans."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._name: str | None = None
        self._start = 0.0

    def __call__(self, name: str | None) -> None:
        now = time.time()
        if self._name is not None:
            self._trace.add("phases", self._name, self._start, now)
            self._trace.flush()
        self._name, self._start = name, now


def read_span(line: bytes) -> Span | None:
    """None for what is no span, as a kill in the middle of a write leaves it."""
    try:
        span = json.loads(line)
    except ValueError:
        return None
    if not isinstance(span, dict) or not isinstance(span.get("track"), str) or not isinstance(span.get("name"), str):
        return None
    start, end = as_number(span.get("start")), as_number(span.get("end"))
    return span if start is not None and end is not None and start <= end else None


def read_spans(folder: Path) -> dict[str, list[Span]]:
    """process -> its spans by start; broken lines are left out. One may be in the middle: a kill, then a resume."""
    found: dict[str, list[Span]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            spans = [span for line in file if (span := read_span(line)) is not None]
        found[path.stem] = sorted(spans, key=lambda span: span["start"])
    return found


def assign_lanes(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """(lane, span) so that spans of one lane do not overlap, with as few lanes as that takes; by start."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    placed, count = [], 0
    for span in spans:
        while busy and busy[0][0] <= span["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(busy, (span["end"], lane))
        placed.append((lane, span))
    return placed


def write_trace(run_dir: Path) -> Path | None:
    """Merge RUN_DIR/trace/*.jsonl into RUN_DIR/trace.json in Chrome's format; None when there is nothing."""
    processes = read_spans(run_dir / FOLDER)
    starts = [spans[0]["start"] for spans in processes.values() if spans]
    if not starts:
        return None
    zero, events = min(starts), []
    for pid, (process, spans) in enumerate(processes.items(), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        tid = 0
        for track in dict.fromkeys(span["track"] for span in spans):
            placed = assign_lanes(span for span in spans if span["track"] == track)
            for lane in range(1 + max(lane for lane, _ in placed)):
                name = track if lane == 0 else f"{track} ({lane + 1})"
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid + lane, "args": {"name": name}})
            events += [_event(span, zero, pid, tid + lane) for lane, span in placed]
            tid += 1 + max(lane for lane, _ in placed)
    path = run_dir / TRACE_FILE
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _event(span: Span, zero: float, pid: int, tid: int) -> dict[str, Any]:
    start, end = round(1e6 * (span["start"] - zero)), round(1e6 * (span["end"] - zero))
    return {
        "ph": "X", "name": span["name"], "cat": span["track"], "pid": pid, "tid": tid,
        "ts": start, "dur": max(1, end - start), "args": span.get("args", {}),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Write trace.json of a run folder."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("usage: python -m slime_rl.observability.trace RUN_DIR", file=sys.stderr)
        return 2
    path = write_trace(Path(words[0]))
    if path is None:
        print(f"{words[0]}: no {FOLDER}/*.jsonl there; run with --trace", file=sys.stderr)
        return 2
    print(f"{path}: open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
