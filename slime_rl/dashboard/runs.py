"""What the pages ask for, read from run folders: nothing of a run has to be alive, and nothing is written."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_rl.observability.advice import advise
from slime_rl.observability.metrics import find_metric
from slime_rl.observability.run_record import RunRecord, load_run
from slime_rl.observability.trace import FOLDER as TRACE_FOLDER
from slime_rl.observability.trace import assign_lanes, read_spans
from slime_rl.observability.tracker import METRICS_FILE, SAMPLES_FILE

LIVE_S = 120.0  # a run without a summary whose metrics are older than this is shown as stopped
MAX_SPANS = 4000  # the newest ones; more than a page can draw at once


@dataclass
class Run:
    """One run folder; read again only when its files have changed."""

    folder: Path
    _stamp: tuple[float, ...] = field(default=(), init=False)
    _record: RunRecord | None = field(default=None, init=False)

    @property
    def record(self) -> RunRecord:
        """The run as it is now.

        Raises:
            ValueError: it has no metrics yet, or a file that cannot be read.
        """
        stamp = tuple(_changed(self.folder / name) for name in (METRICS_FILE, SAMPLES_FILE, "summary.json"))
        if self._record is None or stamp != self._stamp:
            self._record, self._stamp = load_run(self.folder), stamp
        return self._record

    @property
    def state(self) -> str:
        """finished, failed, running or stopped."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        if (self.folder / "error.log").is_file():
            return "failed"
        return "running" if time.time() - _changed(self.folder / METRICS_FILE) < LIVE_S else "stopped"

    def overview(self) -> dict[str, Any]:
        """State, flags, summary and advice."""
        record = self.record
        ahead = record.config.get("rollout", {}).get("rollout_ahead", 0)
        advice = advise(record.history(), rollout_ahead=ahead, run_phases_s=record.run_phases_s)
        error = self.folder / "error.log"
        return {
            "folder": str(self.folder),
            "state": self.state,
            "steps": record.num_steps,
            "num_steps": record.config.get("train", {}).get("num_steps"),
            "seconds": record.seconds,
            "command": record.command(),
            "flags": [[flag, value] for flag, value in record.changed_flags()],
            "summary": record.summary,
            "advice": [advice.sentence for advice in advice],
            "error": error.read_text(errors="replace")[-2000:] if error.is_file() else "",
        }

    def metrics(self) -> dict[str, Any]:
        """metric -> its points and what it means."""
        record = self.record
        found = {}
        for name in record.names():
            series, known = record.series(name), find_metric(name)
            found[name] = {
                "steps": series.steps,
                "values": series.values,
                "unit": known.unit if known else "",
                "meaning": known.meaning if known else "",
            }
        return found

    def samples(self, step: int | None) -> dict[str, Any]:
        """Steps that have samples, and those of `step` (the newest when None), by group."""
        samples = self.record.samples
        steps = sorted({sample["step"] for sample in samples})
        chosen = step if step is not None else (steps[-1] if steps else None)
        groups: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            if sample["step"] == chosen:
                groups.setdefault(sample["group_index"], []).append(sample)
        return {"steps": steps, "step": chosen, "groups": [_group(members) for members in groups.values()]}

    def timeline(self) -> dict[str, Any]:
        """Spans of --trace by process and track, in lanes; empty without it."""
        processes = read_spans(self.folder / TRACE_FOLDER)
        newest = sorted((s["start"] for spans in processes.values() for s in spans), reverse=True)[:MAX_SPANS]
        since = newest[-1] if newest else 0.0
        tracks = []
        for process, spans in processes.items():
            shown = [span for span in spans if span["start"] >= since]
            for track in dict.fromkeys(span["track"] for span in shown):
                placed = assign_lanes(span for span in shown if span["track"] == track)
                bars = [[lane, s["start"] - since, s["end"] - since, s["name"], s["args"]] for lane, s in placed]
                tracks.append({"process": process, "track": track, "bars": bars})
        return {"tracks": tracks, "seconds": max((bar[2] for t in tracks for bar in t["bars"]), default=0.0)}


def _group(members: list[dict[str, Any]]) -> dict[str, Any]:
    """A group's samples with each reward's distance from the mean of those shown."""
    rewards = [m["reward"] for m in members if isinstance(m.get("reward"), (int, float))]
    mean = sum(rewards) / len(rewards) if rewards else None
    for member in members:
        known = mean is not None and isinstance(member.get("reward"), (int, float))
        member["reward_minus_mean"] = member["reward"] - mean if known else None
    return {"group_index": members[0]["group_index"], "prompt": members[0]["prompt"], "mean": mean, "samples": members}


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def find_runs(paths: list[Path]) -> list[Run]:
    """The run folders among `paths`; a folder of runs stands for those in it.

    Raises:
        ValueError: a path that is neither.
    """
    found: list[Run] = []
    for path in paths:
        if (path / METRICS_FILE).is_file() or (path / "config.json").is_file() or (path / ".lock").is_file():
            found.append(Run(path))
            continue
        inside = sorted(p.parent for p in path.glob(f"*/{METRICS_FILE}"))
        if not inside:
            raise ValueError(f"{path}: must be the folder of a run, or hold such folders")
        found += [Run(folder) for folder in inside]
    return found


def as_json(value: Any) -> bytes:
    """JSON without NaN, which browsers refuse."""
    return json.dumps(value, default=str, allow_nan=False).encode()
