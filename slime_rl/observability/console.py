"""What the user watches: one live panel on a terminal, one plain line per step when the output goes to a file or pipe.

with Console.for_config(config, start_step) as console:
    console.start({"model": "…", "devices": "…"})
    timer = PhaseTimer(on_phase=console.phase)
    console.evaluation(0, metrics)          # steps done so far
    console.step(step, metrics, sample)     # the step that has just ended, counted from 0
    console.finish({"accuracy": "0.31 -> 0.94", "report": "runs/x/report.html"})
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live

from slime_rl.config import Config
from slime_rl.observability.advice import Advice, advise
from slime_rl.observability.console_view import RunView, evaluation_line, live_panel, step_line
from slime_rl.observability.streams import say
from slime_rl.observability.wording import duration
from slime_rl.types import Sample

REPEAT_ADVICE_STEPS = 20  # a log that says the same thing at every step is not read


class Console:
    """See the module. Safe to call from several threads; `stream` is standard output when not given."""

    def __init__(
        self,
        *,
        title: str,
        num_steps: int,
        start_step: int = 0,
        rollout_ahead: int = 0,
        stream: IO[str] | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = RunView(title=title, num_steps=num_steps, start_step=start_step)
        self._rollout_ahead = rollout_ahead
        self._stream = stream or sys.stdout
        self._clock = clock
        self._lock = threading.RLock()
        self._begin = self._last_step_end = clock()
        self._advised: dict[str, int] = {}
        self._live: Live | None = None
        if self._stream.isatty() if live is None else live:
            rich = RichConsole(file=self._stream, force_terminal=True)
            # One refresh a second: the panel must not take the cores from the trainer.
            self._live = Live(console=rich, refresh_per_second=1, get_renderable=lambda: self._render(rich.width))

    @classmethod
    def for_config(cls, config: Config, start_step: int = 0) -> Console:
        """The console of a run; `start_step` is the first step that will run."""
        return cls(
            title=f"slime_rl · {config.run_dir}",
            num_steps=config.train.num_steps,
            start_step=start_step,
            rollout_ahead=config.steps_ahead,
        )

    def start(self, facts: Mapping[str, str]) -> None:
        """Show what runs: a few named facts (model, devices, engines, where files go)."""
        with self._lock:
            self._view.facts = dict(facts)
        if self._live is not None:
            self._live.start()
            return
        self._print(self._view.title)
        for name, text in facts.items():
            self._print(f"  {name}: {text}")

    def phase(self, name: str | None) -> None:
        """The phase that runs now; None between phases. Shown in the live panel only."""
        with self._lock:
            view, now = self._view, self._clock()
            if view.phase is not None:
                view.phases_s[view.phase] = view.phases_s.get(view.phase, 0.0) + now - view.phase_since
            view.phase, view.phase_since = name, now

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None:
        """`step` has ended with these metrics; `sample` is one to show."""
        with self._lock:
            view, now = self._view, self._clock()
            first = not view.history
            view.add({"step": step, **metrics})
            # The first gap holds the start-up of engines and trainer; the step's own time predicts better.
            view.step_seconds.append(metrics.get("perf/step_s", 0.0) if first else now - self._last_step_end)
            self._last_step_end = now
            view.last_sample = sample or view.last_sample
            view.advice = advise(view.history, rollout_ahead=self._rollout_ahead, run_phases_s=view.phases_s)
            lines = [] if self._live else [step_line(view), *self._new_advice(step, view.advice)]
        for line in lines:
            self._print(line)
        self._refresh()

    def evaluation(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after `steps_done` steps has ended with these eval/* metrics."""
        with self._lock:
            self._view.evaluations.append((steps_done, dict(metrics)))
            line = evaluation_line(self._view)
        if self._live is None:
            self._print(line)
        self._refresh()

    def message(self, text: str) -> None:
        """One line for the user, above the live panel or in the log."""
        if self._live is not None and self._live.is_started:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def handler(self) -> logging.Handler:
        """A logging handler that writes through `message`, so that log records do not tear the panel apart."""
        return _ConsoleHandler(self)

    def finish(self, summary: Mapping[str, str]) -> None:
        """End the view and print the outcome; it stays on the screen."""
        self.close()
        self._print(f"done: {self._view.steps_done} steps in {duration(self._clock() - self._begin)}")
        for name, text in summary.items():
            self._print(f"  {name}: {text}")

    def close(self) -> None:
        """Stop the live view and give the terminal back; calling it again does nothing."""
        with self._lock:
            self._view.phase = None
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _new_advice(self, step: int, advice: list[Advice]) -> list[str]:
        due = [a for a in advice if step - self._advised.get(a.topic, -REPEAT_ADVICE_STEPS) >= REPEAT_ADVICE_STEPS]
        self._advised.update({a.topic: step for a in due})
        return [f"advice: {a.sentence}" for a in due]

    def _render(self, width: int) -> RenderableType:
        with self._lock:
            self._view.now = self._clock()
            self._view.elapsed_s = self._view.now - self._begin
            return live_panel(self._view, width)

    def _refresh(self) -> None:
        if self._live is not None and self._live.is_started:
            try:
                self._live.refresh()
            except OSError:  # the terminal is gone; the run goes on
                self._live = None

    def _print(self, text: str) -> None:
        say(text, self._stream)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self._console.message(self.format(record))
