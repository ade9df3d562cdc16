"""The curves of a run as PNG files, by matplotlib without a display."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slime_rl.observability.run_record import RunRecord, Series
from slime_rl.observability.timers import OTHER

BLUE, ORANGE, GREY = "#2f6db3", "#e07b1a", "#8a8f98"
PHASES = ("rollout", "train", "sync", "commit", "evaluate", "save")  # in the order of PHASE_COLOURS
PHASE_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
SMOOTH_FROM = 30  # steps; shorter curves are read as they are
MAX_BARS = 150  # of a chart; matplotlib takes milliseconds for each, minutes for those of 10,000 steps


def write_charts(record: RunRecord, folder: Path) -> dict[str, Path]:
    """Write a PNG for every chart that the run has data for -> chart name -> file."""
    written = {}
    for name, (title, draw) in CHARTS.items():
        figure = Figure(figsize=(6.4, 3.4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        if not draw(record, axes):
            continue
        _dress(axes, title)
        written[name] = folder / f"{name}.png"
        figure.savefig(written[name])
    return written


def _reward(record: RunRecord, axes: Axes) -> bool:
    mean, std = record.series("rollout/reward_mean"), record.series("rollout/reward_std")
    if len(mean) < 2:
        return False
    if mean.steps == std.steps:
        best = max(record.series("rollout/reward_max").values, default=math.inf)
        worst = min(record.series("rollout/reward_min").values, default=-math.inf)
        pairs = list(zip(mean.values, std.values, strict=True))
        low, high = [max(worst, m - s) for m, s in pairs], [min(best, m + s) for m, s in pairs]
        axes.fill_between(mean.steps, low, high, color=BLUE, alpha=0.12, lw=0, label="± 1 std of samples")
    _line(axes, mean, BLUE, "mean of the step")
    axes.set_ylabel("reward")
    axes.legend(loc="best")
    return True


def _accuracy(record: RunRecord, axes: Axes) -> bool:
    names = record.eval_sets()
    if names and all(len(record.series(f"eval/{name}/accuracy")) == 1 for name in names):
        return _accuracy_bars(record, axes, names)
    for i, name in enumerate(names):
        series = record.series(f"eval/{name}/accuracy")
        colour = PHASE_COLOURS[i % len(PHASE_COLOURS)]
        axes.plot(series.steps, series.values, color=colour, marker="o", ms=4, lw=1.8, label=name)
        for at in sorted({0, len(series) - 1}) if len(names) == 1 else []:
            axes.annotate(
                f"{series.values[at]:.3f}",
                (series.steps[at], series.values[at]),
                (0, 8 if at else -16),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=colour,
            )
    if not names:
        return False
    values = [value for name in names for value in record.series(f"eval/{name}/accuracy").values]
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.08)
    axes.margins(x=0.06)
    axes.set_ylabel("held-out accuracy")
    axes.legend(loc="lower right")
    return True


def _accuracy_bars(record: RunRecord, axes: Axes, names: list[str]) -> bool:
    """One evaluation is no curve: a bar for each set."""
    values = [record.series(f"eval/{name}/accuracy").values[0] for name in names]
    axes.bar_label(axes.bar(names, values, width=0.35, color=BLUE), fmt="%.3f", padding=3, fontsize=9)
    axes.margins(x=max(0.1, 0.8 / len(names)), y=0.12)
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.08)
    axes.set_xlabel("evaluation set")
    axes.set_ylabel("held-out accuracy")
    return True


def _loss(record: RunRecord, axes: Axes) -> bool:
    loss = record.series("train/loss")
    if len(loss) < 2:
        return False
    _line(axes, loss, BLUE, "loss")
    axes.set_ylabel("loss (nats per token)" if record.config.get("train", {}).get("loss") == "sft" else "loss")
    return True


def _logprob_diff(record: RunRecord, axes: Axes) -> bool:
    mean, largest = record.series("train/logprob_diff_mean_abs"), record.series("train/logprob_diff_max_abs")
    if len(mean) < 2:
        return False
    axes.plot(largest.steps, largest.values, color=ORANGE, lw=1.5, label="largest of the step")
    axes.plot(mean.steps, mean.values, color=BLUE, lw=1.8, label="mean of the step")
    if positive := [value for value in [*mean.values, *largest.values] if value > 0]:
        axes.set_yscale("log", nonpositive="mask")
        # Whole decades, so that the axis has few labels and its height means the same from run to run.
        axes.set_ylim(10 ** math.floor(math.log10(min(positive))), 10 ** math.ceil(math.log10(max(positive) * 1.01)))
    axes.set_ylabel("|trainer \N{MINUS SIGN} engine| (nats)")
    axes.legend(loc="best")
    return True


def _length(record: RunRecord, axes: Axes) -> bool:
    mean, longest = record.series("rollout/response_length_mean"), record.series("rollout/response_length_max")
    if len(mean) < 2:
        return False
    axes.plot(longest.steps, longest.values, color=GREY, lw=1.2, label="longest")
    axes.plot(mean.steps, mean.values, color=BLUE, lw=1.8, label="mean")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("response length (tokens)")
    axes.legend(loc="best")
    return True


def phase_colour(phase: str, place: int) -> str:
    """The same in every report; phases that are not known get those that are left, by `place`."""
    at = PHASES.index(phase) if phase in PHASES else len(PHASES) + place
    return PHASE_COLOURS[at % len(PHASE_COLOURS)]


def _timing(record: RunRecord, axes: Axes) -> bool:
    steps = record.series("perf/step_s").steps
    phases = [phase for phase, *_ in record.breakdown().rows() if phase != OTHER]
    if not steps or not phases:
        return False
    size = math.ceil(len(steps) / MAX_BARS)
    parts = [steps[at : at + size] for at in range(0, len(steps), size)]
    places, widths = [fmean(part) for part in parts], [part[-1] - part[0] + 1.0 for part in parts]
    base = [0.0] * len(parts)
    for i, phase in enumerate([*phases, OTHER]):
        series = record.series(f"timing_s/{phase}")
        by_step = dict(zip(series.steps, series.values, strict=True))
        heights = [fmean(by_step.get(step, 0.0) for step in part) for part in parts]
        colour = GREY if phase == OTHER else phase_colour(phase, i)
        axes.bar(places, heights, widths if len(steps) > 1 else 0.5, bottom=base, color=colour, label=phase, lw=0)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.margins(x=0.01)
    axes.set_ylabel("seconds per step" if size == 1 else f"seconds per step, means of {size}")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return True


CHARTS: dict[str, tuple[str, Callable[[RunRecord, Axes], bool]]] = {
    "accuracy": ("Accuracy on held-out prompts", _accuracy),
    "reward": ("Reward of the samples trained on", _reward),
    "loss": ("Training loss", _loss),
    "logprob_diff": ("Log-prob gap between engine and trainer", _logprob_diff),
    "length": ("Response length", _length),
    "timing": ("Where the time of a step goes", _timing),
}


def _line(axes: Axes, series: Series, colour: str, label: str) -> None:
    """The curve; a long one faint, with its running mean on top."""
    if len(series) < SMOOTH_FROM:
        axes.plot(series.steps, series.values, color=colour, lw=1.8, label=label)
        return
    window = max(5, len(series) // 20)
    axes.plot(series.steps, series.values, color=colour, lw=0.9, alpha=0.45, label=label)
    axes.plot(series.steps, _running_mean(series.values, window), color=colour, lw=2.0, label=f"mean of {window} steps")


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean over the last `window` values, fewer at the start -> same length."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, fontweight="bold", loc="left")
    if not axes.get_xlabel():
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#e6e8eb", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors="#4a4f57", labelsize=9)
    if legend := axes.get_legend():
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set_fontsize(8.5)
