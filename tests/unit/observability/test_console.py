from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console as RichConsole

from slime_rl.observability.console import Console
from slime_rl.observability.console_view import RunView, live_panel
from slime_rl.types import Sample, Status

STEP = {
    "rollout/reward_mean": 0.5,
    "train/loss": 0.0123,
    "train/logprob_diff_mean_abs": 2.1e-6,
    "rollout/response_length_mean": 12.34,
    "perf/tokens_per_s": 1234.5,
    "perf/step_s": 4.0,
    "timing_s/rollout": 2.0,
    "timing_s/train": 1.96,
    "timing_s/other": 0.04,
    "buffer/waiting": 3.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_console(num_steps: int = 100, start_step: int = 0) -> tuple[Console, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    console = Console(title="run", num_steps=num_steps, start_step=start_step, stream=stream, clock=clock)
    return console, stream, clock


def test_piped_output_is_one_ascii_line_per_step() -> None:
    console, stream, _ = plain_console()
    console.start({"model": "tiny"})
    console.phase("rollout")
    console.step(0, STEP)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["run", "  model: tiny"]
    assert lines[2:] == [
        "step   1/100 | reward 0.500 | loss 0.0123 | log-prob diff 2.1e-06 | length 12.3 | 1234 tok/s | "
        "4.00 s (rollout 50%, train 49%, other 1%) | ETA 6 min 36 s"
    ]
    assert stream.getvalue().isascii()


def test_eta_follows_the_wall_clock_between_steps_not_start_up() -> None:
    console, stream, clock = plain_console(num_steps=4)
    clock.now = 1000.0
    console.step(0, STEP)
    clock.now = 1010.0
    console.step(1, STEP)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("ETA 12.0 s")  # 3 steps of 4 s
    assert second.endswith("ETA 14.0 s")  # 2 steps of (4 + 10) / 2 s


def test_resumed_run_counts_the_steps_before_it() -> None:
    console, stream, _ = plain_console(num_steps=10, start_step=8)
    console.step(8, STEP)
    assert stream.getvalue().startswith("step  9/10 ") and "ETA 4.00 s" in stream.getvalue()


def test_step_without_metrics_is_still_told() -> None:
    console, stream, _ = plain_console(num_steps=2)
    console.step(0, {})
    assert stream.getvalue() == "step 1/2\n"


def test_evaluation_is_told_with_the_first_one_to_compare() -> None:
    console, stream, _ = plain_console()
    console.evaluation(0, {"eval/math/accuracy": 0.25, "eval/math/response_length_mean": 7.0})
    console.evaluation(10, {"eval/math/accuracy": 0.75, "eval/math/response_length_mean": 8.0})
    assert stream.getvalue().splitlines() == [
        "eval before training | math accuracy 0.25 | length 7",
        "eval after 10 steps | math accuracy 0.75 (before 0.25) | length 8",
    ]


def test_advice_is_given_once_in_a_while() -> None:
    console, stream, _ = plain_console()
    for step in range(25):
        console.step(step, {**STEP, "rollout/truncated_fraction": 0.5})
    advice = [line for line in stream.getvalue().splitlines() if line.startswith("advice: ")]
    assert len(advice) == 2 and "--max-response-len" in advice[0]


def test_finish_prints_the_outcome() -> None:
    console, stream, clock = plain_console(num_steps=1)
    console.step(0, STEP)
    clock.now = 65.0
    console.finish({"accuracy": "0.31 -> 0.94"})
    assert stream.getvalue().splitlines()[-2:] == ["done: 1 steps in 1 min 05 s", "  accuracy: 0.31 -> 0.94"]


def test_log_records_go_through_the_console() -> None:
    console, stream, _ = plain_console()
    logger = logging.getLogger("test_console")
    logger.addHandler(handler := console.handler())
    logger.warning("engine 0 is slow [x]")
    logger.removeHandler(handler)
    assert stream.getvalue().endswith(" WARNING test_console: engine 0 is slow [x]\n")


def test_live_view_draws_on_a_terminal_and_leaves_it_usable() -> None:
    stream = io.StringIO()
    with Console(title="run", num_steps=2, stream=stream, live=True) as console:
        console.start({"model": "tiny"})
        console.evaluation(0, {"eval/math/accuracy": 0.25})
        console.step(0, STEP)
        console.message("a line [not markup]")
        console.finish({"report": "report.html"})
    text = stream.getvalue()
    assert "step 1/2" in text and "a line [not markup]" in text and "  report: report.html" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # cursor hidden once, shown again once


@pytest.mark.parametrize("width", [40, 80, 200])
def test_panel_fits_every_width_and_shows_what_matters(width: int) -> None:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt=[{"role": "user", "content": "1+1=?"}], response="2")
    sample.reward, sample.status = 1.0, Status.COMPLETED
    view = RunView(title="run", num_steps=5, history=[{"step": 0.0, **STEP}, {"step": 1.0, **STEP}], last_sample=sample)
    view.evaluations = [(0, {"eval/math/accuracy": 0.25})]
    view.phase, view.now = "rollout", 3.0
    stream = io.StringIO()
    RichConsole(file=stream, width=width, color_system=None).print(live_panel(view, width))
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert all(word in text for word in ("reward", "accuracy", "loss", "time", "buffer", "sample"))


def test_panel_says_what_the_engines_do() -> None:
    line = {"step": 0.0, **STEP, "engines/serving": 3.0, "engines/stale": 1.0, "engines/down": 0.0}
    view = RunView(title="run", num_steps=5, history=[line | {"faults/engine_restarts": 2.0}])
    stream = io.StringIO()
    RichConsole(file=stream, width=120, color_system=None).print(live_panel(view, 120))
    assert "3 serving · 1 stale · 2 engine restarts so far" in stream.getvalue()


def test_panel_before_the_first_step_shows_the_facts() -> None:
    stream = io.StringIO()
    RichConsole(file=stream, width=80).print(live_panel(RunView(title="t", num_steps=0, facts={"model": "tiny"}), 80))
    assert "tiny" in stream.getvalue() and "step 0/0" in stream.getvalue()


def test_of_older_steps_only_what_is_read_is_kept() -> None:
    view = RunView(title="run", num_steps=1000)
    for step in range(100):
        view.add({"step": step, "train/loss": float(step), **{f"rollout/{i}": 0.0 for i in range(200)}})
    assert view.series("train/loss") == [float(step) for step in range(100)]
    assert view.steps_done == 100
    assert len(view.series("rollout/7")) == 20, "what advice takes means of"
    assert sum(map(len, view.history)) < 100 * 4 + 20 * 202
