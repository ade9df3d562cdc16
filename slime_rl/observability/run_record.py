"""A run folder read back: metrics, configuration and samples, for the report and for tools."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_rl.config import SECTIONS
from slime_rl.config.flags import flag_name
from slime_rl.observability.advice import Advice, advise
from slime_rl.observability.metrics import as_number, phase_of
from slime_rl.observability.timers import OTHER, Breakdown
from slime_rl.observability.tracker import CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over steps; equal lengths, steps ascending."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run left behind: `lines` of metrics.jsonl, `config` as section -> field -> value (may be empty)."""

    folder: Path
    lines: list[dict[str, Any]]
    config: dict[str, dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]  # of summary.json, written when the run ends; empty before

    def series(self, name: str) -> Series:
        """The values of a metric that are numbers; a step that was logged twice counts with its last value."""
        points = {line["step"]: value for line in self.lines if (value := as_number(line.get(name))) is not None}
        steps = sorted(points)
        return Series(steps=steps, values=[points[step] for step in steps])

    def names(self) -> list[str]:
        """Every metric of the run, in order of appearance."""
        seen = {name: None for line in self.lines for name in line if name not in ("step", "time_s")}
        return list(seen)

    def eval_sets(self) -> list[str]:
        """Those with an accuracy that is a number."""
        names = [n for n in self.names() if n.startswith("eval/") and n.endswith("/accuracy")]
        return [name.split("/")[1] for name in names if self.series(name).values]

    @property
    def num_steps(self) -> int:
        """Training steps with metrics."""
        return len(self.series("perf/step_s")) or len(self.series("train/loss"))

    @property
    def seconds(self) -> float:
        """Seconds of running up to the last logged line."""
        return max((as_number(line.get("time_s")) or 0.0 for line in self.lines), default=0.0)

    def phases(self) -> list[str]:
        """Phases of a step, without their parts and without the time in no phase."""
        return [phase for name in self.names() if (phase := phase_of(name)) is not None and phase != OTHER]

    def parts(self, phase: str) -> list[tuple[str, float]]:
        """(part, seconds over all steps) of a phase that is timed in parts, longest first."""
        prefix = f"timing_s/{phase}/"
        names = [name for name in self.names() if name.startswith(prefix)]
        sums = [(name.removeprefix(prefix), sum(self.series(name).values)) for name in names]
        return sorted(sums, key=lambda part: -part[1])

    @property
    def run_phases_s(self) -> dict[str, float]:
        """Seconds of the whole run by phase, from summary.json; empty while the run goes on."""
        phases = self.summary.get("phases_s")
        known = phases.items() if isinstance(phases, dict) else ()
        return {name: seconds for name, value in known if (seconds := as_number(value)) is not None}

    def breakdown(self) -> Breakdown:
        """Time of the logged steps by phase."""
        return Breakdown(
            total_s=sum(self.series("perf/step_s").values),
            phases_s={phase: sum(self.series(f"timing_s/{phase}").values) for phase in self.phases()},
            num_steps=self.num_steps,
        )

    def history(self) -> list[dict[str, float]]:
        """Lines of training steps, as `advise` takes them."""
        return [
            {name: value for name, item in line.items() if (value := as_number(item)) is not None}
            for line in self.lines
            if any(name.startswith(("train/", "rollout/")) for name in line)
        ]

    def advice(self) -> list[Advice]:
        """What limits the run, from its metrics so far."""
        ahead = self.config.get("rollout", {}).get("rollout_ahead")
        asynchrony = self.config.get("asynchrony", {})
        if asynchrony.get("fully_async"):
            ahead = asynchrony.get("max_staleness")
        return advise(self.history(), rollout_ahead=int(as_number(ahead) or 0), run_phases_s=self.run_phases_s)

    def changed_flags(self) -> list[tuple[str, Any]]:
        """(flag, value) of every flag that does not have its default value."""
        return changed_flags(self.config)

    def command(self) -> str:
        """The command line that asks for the same run."""
        words = ["python", "-m", "slime_rl.train"]
        passthrough = {
            f.name: f.metadata.get("passthrough") for cls in SECTIONS.values() for f in dataclasses.fields(cls)
        }
        for flag, value in self.changed_flags():
            prefix = passthrough.get(flag.removeprefix("--").replace("-", "_"))
            values = list(map(str, value if isinstance(value, list) else [value]))
            if prefix:
                words += [f"--{prefix}-{v[2:]}" if v.startswith("--") else v for v in values]
            elif isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                words += [flag, *values]
        return shlex.join(words)


def changed_flags(config: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    """(flag, value) of every flag without its default value, from a config as section -> field -> value."""
    found = []
    for section, cls in SECTIONS.items():
        values = config.get(section, {})
        for item in dataclasses.fields(cls):
            if item.name in values and not _same(values[item.name], item.default):
                found.append((flag_name(item.name), values[item.name]))
    return found


def load_run(folder: Path) -> RunRecord:
    """Read RUN_DIR; config.json, samples.jsonl and summary.json may be missing.

    Raises:
        ValueError: no metrics.jsonl there, or a file that cannot be read, as file:line.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise ValueError(f"{folder}: must be the folder of a run, with {METRICS_FILE} in it")
    samples_path = folder / SAMPLES_FILE
    return RunRecord(
        folder=folder,
        lines=read_jsonl(metrics),
        config=read_config(folder / CONFIG_FILE),
        samples=read_jsonl(samples_path) if samples_path.is_file() else [],
        summary=read_object(folder / SUMMARY_FILE),
    )


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """section -> field -> value of a config.json, empty when there is no such file.

    Raises:
        ValueError: it is something else, as file:line or by section.
    """
    config = read_object(path)
    for section, fields in config.items():
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: {section} must be an object, field -> value, got {fields!r}")
    return config


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file.

    Raises:
        ValueError: it is something else, as file:line.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content


def _same(value: Any, default: Any) -> bool:
    return (tuple(value) if isinstance(value, list) else value) == default
