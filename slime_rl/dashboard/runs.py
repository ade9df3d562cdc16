"""What the pages ask for, read from run folders: nothing of a run has to be alive, and nothing is written."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_rl.dashboard.line_file import LineFile, read_step_line
from slime_rl.dashboard.samples import Samples
from slime_rl.dashboard.timeline import Timeline
from slime_rl.observability.metrics import as_number, find_metric
from slime_rl.observability.run_record import SUMMARY_FILE, RunRecord, read_config, read_object
from slime_rl.observability.trace import FOLDER as TRACE_FOLDER
from slime_rl.observability.tracker import CONFIG_FILE, METRICS_FILE, SAMPLES_FILE

LIVE_S = 120.0  # without its lock, a run whose metrics are older than this is shown as stopped
MAX_POINTS = 1200  # of a curve; a longer one keeps the lowest and the highest value of each part
LOG_TAIL = 4000  # characters of each log
ERROR_FILE, LOCK_FILE, FAULTS_FILE = "error.log", ".lock", "logs/faults.log"


class Run:
    """One run folder; what has been read of its files is kept, and only what is new is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: LineFile[dict[str, Any]] = LineFile(folder / METRICS_FILE, read_step_line)
        self.samples = Samples(folder / SAMPLES_FILE)
        self.timeline = Timeline(folder / TRACE_FOLDER)
        self.notes: list[str] = []
        self.lock = threading.Lock()  # a page asks for several parts at once, and each is answered by a thread

    @property
    def record(self) -> RunRecord:
        """The run as it is now; what cannot be read is left out, and `notes` say so.

        Raises:
            ValueError: the folder is not there any more.
        """
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not there any more")
        lines, self.notes = self.lines.look(), []
        if not lines:
            has_file = self.lines.generation is not None
            what = "no whole line in it" if has_file else "not been written"
            self.notes.append(f"{METRICS_FILE} has {what} yet; the first step or evaluation brings it")
        if broken := self.lines.broken:
            numbers = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
            self.notes.append(f"{METRICS_FILE}: left out, not a JSON object with a step: line {numbers}")
        config, summary = self._object(CONFIG_FILE, read_config), self._object(SUMMARY_FILE, read_object)
        return RunRecord(folder=self.folder, lines=lines, config=config, samples=[], summary=summary)

    def _object(self, name: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        try:
            return read(self.folder / name)
        except (ValueError, OSError) as error:
            self.notes.append(str(error))
            return {}

    @property
    def stamp(self) -> str:
        """Another one whenever the answers may be others."""
        names = (METRICS_FILE, SAMPLES_FILE, CONFIG_FILE, SUMMARY_FILE, ERROR_FILE, FAULTS_FILE)
        files = [self.folder / name for name in names] + self.timeline.files()
        return f"{self.state}-{'-'.join(f'{size:x}.{changed:x}' for size, changed in map(_stat, files))}"

    @property
    def state(self) -> str:
        """running, finished, failed, stopped (killed, or interrupted) or missing (the folder was taken away).

        A run holds the lock of its folder. Where that cannot be seen, on another machine, the age of its metrics tells.
        """
        if _is_locked(self.folder / LOCK_FILE):
            return "running"
        if not self.folder.is_dir():
            return "missing"
        files = {"metrics": METRICS_FILE, "finished": SUMMARY_FILE, "failed": ERROR_FILE}
        ends = {what: _stat(self.folder / name)[1] for what, name in files.items()}
        newest = max(ends, key=lambda name: ends[name])
        if newest != "metrics":
            return newest
        is_fresh = time.time() - ends["metrics"] / 1e9 < LIVE_S
        # A run that ended wrote its last metrics just before, one that was continued has far newer ones; and a copied
        # folder has its files in any order.
        for end in ("finished", "failed"):
            if ends[end] and ends["metrics"] - ends[end] < 1e9:
                return end
        return "running" if is_fresh else "stopped"

    def overview(self) -> dict[str, Any]:
        """State, flags, summary and advice."""
        record = self.record
        error = self.folder / ERROR_FILE
        state = self.state
        return {
            "folder": str(self.folder),
            "state": state,
            "steps": record.num_steps,
            "num_steps": as_number(record.config.get("train", {}).get("num_steps")),
            "seconds": record.seconds,
            "command": record.command(),
            "flags": [[flag, value] for flag, value in record.changed_flags()],
            "summary": record.summary,
            "advice": [advice.sentence for advice in record.advice()],
            "error": _tail(error) if state != "running" and error.is_file() else "",
            "notes": self.notes,
        }

    def metrics(self) -> dict[str, Any]:
        """`axes`: steps and seconds of running; `metrics`: name -> values over one of the axes, and what they mean."""
        record = self.record
        times = {line["step"]: round(as_number(line.get("time_s")) or 0.0, 1) for line in record.lines}
        axes: dict[tuple[int, ...], int] = {}  # nearly all metrics are there at the same steps
        found = {}
        for name in record.names():
            series, known = record.series(name), find_metric(name)
            steps, values = thin(series.steps, series.values)
            found[name] = {
                "axis": axes.setdefault(tuple(steps), len(axes)),
                "values": [float(f"{value:.6g}") for value in values],
                "unit": known.unit if known else "",
                "meaning": known.meaning if known else "",
            }
        return {"axes": [{"steps": a, "times": [times[step] for step in a]} for a in axes], "metrics": found}

    def engines(self) -> dict[str, Any]:
        """Ends of the logs of engines and router, and what was replaced."""
        logs = [p for p in sorted((self.folder / "logs").glob("*.log")) if p.stem.startswith(("engine", "router"))]
        faults = self.folder / FAULTS_FILE
        return {
            "faults": _tail(faults).splitlines() if faults.is_file() else [],
            "logs": [{"name": path.name, "tail": _tail(path)} for path in logs],
        }


def thin(steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points: of each part of a longer curve its lowest and its highest, and the last point."""
    if len(steps) <= most:
        return list(steps), list(values)
    size = math.ceil(2 * (len(steps) - 1) / (most - 1))
    kept = {len(steps) - 1}
    for start in range(0, len(steps), size):
        part = range(start, min(start + size, len(steps)))
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    chosen = sorted(kept)[-most:]
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def _stat(path: Path) -> tuple[int, int]:
    """(bytes, nanoseconds of the last change); zeros for a file that is not there."""
    try:
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    except OSError:
        return 0, 0


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the lock; asked of the kernel, because taking it might stop a start."""
    try:
        found, locks = path.stat(), Path("/proc/locks").read_text()
    except OSError:
        return False
    key = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(key in line.split() for line in locks.splitlines())


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL))
        return file.read().decode(errors="replace")


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS_FILE, CONFIG_FILE, LOCK_FILE))


class Runs:
    """The runs among some paths; a folder of runs stands for those in it, also for those that come later."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ValueError for a path that is no run and holds none."""
        self._paths = list(paths)
        self._known: dict[Path, Run] = {}
        for path in paths:
            if not path.is_dir():
                what = "a file" if path.exists() else "not there"
                raise ValueError(f"{path}: must be the folder of a run, or hold such folders; it is {what}")
            if not is_run(path) and not _inside(path):
                raise ValueError(f"{path}: must be the folder of a run, or hold such folders; it holds none")
        self.look()

    def look(self) -> list[Run]:
        """All runs; each keeps its number."""
        for path in self._paths:
            for folder in [path] if is_run(path) else _inside(path):
                self._known.setdefault(folder.resolve(), Run(folder))
        return list(self._known.values())

    def names(self) -> list[str]:
        """As short as tells them apart."""
        parts = [folder.parts for folder in self._known]
        for length in range(1, max(map(len, parts)) + 1):
            names = ["/".join(part[-length:]) for part in parts]
            if len(set(names)) == len(names):
                return names
        return [str(folder) for folder in self._known]


def _inside(path: Path) -> list[Path]:
    if not path.is_dir():  # taken away while we look at it
        return []
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and is_run(folder))


def as_json(value: Any) -> bytes:
    """JSON in which null stands for NaN and infinity, which browsers refuse."""
    try:
        return json.dumps(value, default=str, allow_nan=False).encode()
    except ValueError:  # rare, and looking through everything first would take longer than all the rest
        return json.dumps(_finite(value), default=str, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
