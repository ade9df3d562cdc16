"""What the console shows: the state of a run, one plain line per step, and the live panel. No input or output here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Group as Rows
from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slime_rl.observability.advice import GAP, WINDOW, Advice
from slime_rl.observability.metrics import phase_of, reward_value
from slime_rl.observability.timers import OTHER
from slime_rl.observability.wording import duration, number, one_line, percent, sparkline
from slime_rl.types import Sample

PHASE_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
OF_EVERY_STEP = ("step", "rollout/reward_mean", "train/loss", GAP)  # curves and advice are of the whole run


@dataclass(kw_only=True)
class RunView:
    """Everything the console knows of a run: `history` has one mapping per step, of older steps what is still read."""

    title: str
    num_steps: int
    start_step: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (steps done, eval/* metrics)
    step_seconds: list[float] = field(default_factory=list)  # wall time from one finished step to the next
    advice: list[Advice] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)  # of the whole run, what lies between steps included
    phase: str | None = None
    phase_since: float = 0.0
    last_sample: Sample | None = None
    elapsed_s: float = 0.0
    now: float = 0.0

    def add(self, line: dict[str, float]) -> None:
        """The metrics of a step that has ended."""
        self.history.append(line)
        if len(self.history) > WINDOW:
            old = self.history[-WINDOW - 1]
            self.history[-WINDOW - 1] = {name: old[name] for name in OF_EVERY_STEP if name in old}

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the whole run that are done, those before a resume included."""
        return int(self.history[-1]["step"]) + 1 if self.history else self.start_step

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of the last ten steps; None before the first."""
        if not self.step_seconds:
            return None
        return fmean(self.step_seconds[-10:]) * max(0, self.num_steps - self.steps_done)

    def series(self, name: str) -> list[float]:
        return [line[name] for line in self.history if math.isfinite(line.get(name, math.nan))]

    def accuracies(self) -> list[tuple[int, float]]:
        """(steps done, mean accuracy over evaluation sets) of every evaluation."""
        points = []
        for step, metrics in self.evaluations:
            values = [v for name, v in metrics.items() if name.startswith("eval/") and name.endswith("/accuracy")]
            if values:
                points.append((step, fmean(values)))
        return points


def step_line(view: RunView) -> str:
    """The newest step on one plain ASCII line."""
    metrics = view.history[-1]
    width = len(str(view.num_steps))
    parts = [f"step {view.steps_done:>{width}}/{view.num_steps}"]
    shown = (
        ("reward {:.3f}", "rollout/reward_mean"),
        ("loss {:.4g}", "train/loss"),
        ("grad norm {:.3g}", "train/grad_norm"),
        ("log-prob diff {:.1e}", "train/logprob_diff_mean_abs"),
        ("length {:.1f}", "rollout/response_length_mean"),
        ("{:.0f} tok/s", "perf/tokens_per_s"),
    )
    parts += [words.format(metrics[name]) for words, name in shown if name in metrics]
    if "perf/step_s" in metrics:
        parts.append(f"{duration(metrics['perf/step_s'])}{_phase_words(metrics)}")
    if view.eta_s is not None and view.eta_s > 0:
        parts.append(f"ETA {duration(view.eta_s)}")
    return " | ".join(parts)


def evaluation_line(view: RunView) -> str:
    """The newest evaluation on one plain ASCII line, with the first one to compare."""
    step, metrics = view.evaluations[-1]
    first = view.evaluations[0][1]
    parts = [f"eval after {step} steps" if step else "eval before training"]
    for name, value in metrics.items():
        if name.endswith("/accuracy"):
            before = f" (before {number(first[name])})" if len(view.evaluations) > 1 and name in first else ""
            parts.append(f"{name.removeprefix('eval/').removesuffix('/accuracy')} accuracy {number(value)}{before}")
        elif name.endswith("/response_length_mean"):
            parts.append(f"length {number(value)}")
        elif "/pass_at_" in name:
            parts.append(f"{name.rsplit('/', 1)[1]} {number(value)}")
    return " | ".join(parts)


def live_panel(view: RunView, width: int) -> RenderableType:
    """The whole view as one panel."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True, width=10)
    table.add_column(ratio=1)
    chart = max(10, min(60, width - 60))
    for label, row in [*_curves(view, chart), *_facts(view, width)]:
        table.add_row(label, row)
    rows: list[RenderableType] = [_progress(view), Text(""), table]
    rows += [Text(f"• {advice.sentence}", style="yellow") for advice in view.advice[:3]]
    return Panel(Rows(*rows), title=view.title, title_align="left", border_style="blue", padding=(0, 1))


def _progress(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    eta = f"  ETA {duration(view.eta_s)}" if view.eta_s else ""
    doing = f"  {view.phase} {duration(max(0.0, view.now - view.phase_since))}" if view.phase else ""
    table.add_row(
        Text(f"step {view.steps_done}/{view.num_steps}", style="bold"),
        ProgressBar(total=max(1, view.num_steps), completed=view.steps_done, complete_style="blue"),
        Text(f"{duration(view.elapsed_s)}{eta}{doing}"),
    )
    return table


def _curves(view: RunView, width: int) -> list[tuple[str, Text]]:
    rows = []
    if values := view.series("rollout/reward_mean"):
        rows.append(("reward", _curve(values, width, f"  {number(min(values))} to {number(max(values))}")))
    if points := view.accuracies():
        values = [value for _, value in points]
        rows.append(("accuracy", _curve(values, width, f"  first {number(values[0])} after {points[0][0]} steps")))
    if values := view.series("train/loss"):
        rows.append(("loss", _curve(values, width, f"  {number(min(values))} to {number(max(values))}")))
    return rows


def _curve(values: list[float], width: int, note: str) -> Text:
    newest = (f"{number(values[-1]):<9} ", "bold")
    return Text.assemble(newest, (sparkline(values, width), "green"), (note, "dim"), overflow="ellipsis")


def _facts(view: RunView, width: int) -> list[tuple[str, Text]]:
    rows: list[tuple[str, Text]] = []
    metrics = view.history[-1] if view.history else {}
    if speed := _speed_words(metrics):
        rows.append(("speed", Text(speed)))
    if metrics.get("perf/step_s"):
        rows.append(("time", _time_bar(metrics, max(10, min(40, width - 70)))))
    if health := _health_words(metrics):
        rows.append(("health", Text(health)))
    if engines := _engine_words(metrics):
        rows.append(("engines", Text(engines)))
    if states := {n.removeprefix("buffer/"): v for n, v in metrics.items() if n.startswith("buffer/")}:
        rows.append(("buffer", Text(" · ".join(f"{name} {number(count)}" for name, count in states.items()))))
    if view.last_sample is not None:
        rows.append(("sample", _sample_words(view.last_sample, max(20, width - 20))))
    if not view.history:
        rows = [(label, Text(text)) for label, text in view.facts.items()] + rows
    return rows


def _speed_words(metrics: Mapping[str, float]) -> str:
    words = []
    if "perf/tokens_per_s" in metrics:
        words.append(f"{number(metrics['perf/tokens_per_s'])} tokens/s whole loop")
    if "rollout/tokens_per_s" in metrics:
        words.append(f"{number(metrics['rollout/tokens_per_s'])} tokens/s generated")
    if "perf/peak_rss_gib" in metrics:
        words.append(f"peak memory {metrics['perf/peak_rss_gib']:.1f} GiB")
    return " · ".join(words)


def _health_words(metrics: Mapping[str, float]) -> str:
    words = []
    if "train/logprob_diff_mean_abs" in metrics:
        words.append(f"log-prob diff {number(metrics['train/logprob_diff_mean_abs'])}")
    if "rollout/truncated_fraction" in metrics:
        words.append(f"truncated {percent(metrics['rollout/truncated_fraction'])}")
    if "rollout/zero_std_groups_fraction" in metrics:
        words.append(f"equal-reward groups {percent(metrics['rollout/zero_std_groups_fraction'])}")
    if "rollout/staleness_max" in metrics:
        words.append(f"staleness {number(metrics['rollout/staleness_max'])}")
    return " · ".join(words)


def _engine_words(metrics: Mapping[str, float]) -> str:
    """States that some engine is in, and what was restarted so far."""
    words = []
    for prefix, after in (("engines/", ""), ("faults/", " so far")):
        found = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        words += [f"{number(count)} {name.replace('_', ' ')}{after}" for name, count in found.items() if count]
    return " · ".join(words)


def _time_bar(metrics: Mapping[str, float], width: int) -> Text:
    shares = phase_shares(metrics)
    text, legend = Text(), Text("  ")
    for i, (name, share) in enumerate(shares):
        colour = "grey50" if name == OTHER else PHASE_COLOURS[i % len(PHASE_COLOURS)]
        text.append("█" * round(share * width), style=colour)
        if share >= 0.01:
            legend.append(f"{name} {share:.0%}  ", style=colour)
    return text + legend


def _phase_words(metrics: Mapping[str, float]) -> str:
    words = [f"{name} {share:.0%}" for name, share in phase_shares(metrics) if share >= 0.01]
    return f" ({', '.join(words)})" if words else ""


def phase_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(phase, share of the step) in the order of the metrics; parts of a phase are within it."""
    total = metrics.get("perf/step_s", 0.0)
    if total <= 0:
        return []
    return [(phase, value / total) for name, value in metrics.items() if (phase := phase_of(name)) is not None]


def _sample_words(sample: Sample, width: int) -> Text:
    reward = reward_value(sample.reward)
    score = "none" if reward is None else number(reward)
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1].get("content", ""))
    style = "green" if reward is not None and reward > 0 else "red"
    return Text.assemble(
        (one_line(prompt, width // 2), "dim"),
        " → ",
        one_line(sample.response, width // 3),
        (f"  reward {score}", style),
    )
