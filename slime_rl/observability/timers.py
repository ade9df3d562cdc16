"""Where the time of the driver loop goes: named phases that never overlap, so that what is left over is overhead.

timer.start_step(3)
with timer.phase("rollout"): ...
with timer.phase("train"): ...
timing = timer.end_step()          # timing.metrics() -> timing_s/rollout, timing_s/train, timing_s/other, perf/step_s
print(timer.breakdown().table())   # the whole run
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

OTHER = "other"  # reserved name of the time in no phase


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds of one step. `phases_s` are in the order in which the phases first ran."""

    step: int
    total_s: float
    phases_s: dict[str, float]

    @property
    def other_s(self) -> float:
        """Seconds in no phase: the loop's own overhead."""
        return max(0.0, self.total_s - sum(self.phases_s.values()))

    def metrics(self) -> dict[str, float]:
        """The step as metrics: timing_s/<phase>, timing_s/other and perf/step_s."""
        named = {f"timing_s/{name}": seconds for name, seconds in self.phases_s.items()}
        return {**named, f"timing_s/{OTHER}": self.other_s, "perf/step_s": self.total_s}


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds per phase of a whole run, or of the steps of one."""

    total_s: float
    phases_s: dict[str, float]
    num_steps: int

    @property
    def other_s(self) -> float:
        return max(0.0, self.total_s - sum(self.phases_s.values()))

    @property
    def overhead_share(self) -> float:
        """Share of the time in no phase, 0 to 1."""
        return self.other_s / self.total_s if self.total_s else 0.0

    def rows(self) -> list[tuple[str, float, float, float]]:
        """(phase, seconds, share of the total, seconds per step), longest first, the time in no phase last."""
        ordered = sorted(self.phases_s.items(), key=lambda item: -item[1])
        steps, total = max(1, self.num_steps), self.total_s or 1.0
        return [(name, s, s / total, s / steps) for name, s in [*ordered, (OTHER, self.other_s)]]

    def table(self) -> str:
        """The rows as a Markdown table."""
        head = "| phase | seconds | share | per step |\n|---|---:|---:|---:|"
        body = [f"| {name} | {s:.2f} | {100 * share:.1f} % | {per:.3f} s |" for name, s, share, per in self.rows()]
        last = f"| **total** | {self.total_s:.2f} | 100.0 % | {self.total_s / max(1, self.num_steps):.3f} s |"
        return "\n".join([head, *body, last])


@dataclass
class PhaseTimer:
    """Stopwatch of one loop. Phases do not nest; a phase outside any step counts for the run only.

    `on_phase` is called with the phase's name when one begins and with None when it ends.
    """

    clock: Callable[[], float] = time.monotonic
    on_phase: Callable[[str | None], None] | None = None
    totals_s: dict[str, float] = field(default_factory=dict, init=False)
    num_steps: int = field(default=0, init=False)
    _steps_s: float = field(default=0.0, init=False)
    _in_steps_s: dict[str, float] = field(default_factory=dict, init=False)
    _step: int | None = field(default=None, init=False)
    _step_phases: dict[str, float] = field(default_factory=dict, init=False)
    _current: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._run_start = self._step_start = self.clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`; the time counts also when the block raises.

        Raises:
            ValueError: another phase is running, or the name is reserved.
        """
        if self._current is not None:
            raise ValueError(f"phase {name!r} cannot start inside phase {self._current!r}: phases do not nest")
        if name == OTHER or not name:
            raise ValueError(f"phase name {name!r} is reserved for the time in no phase")
        self._current = name
        self._tell(name)
        start = self.clock()
        try:
            yield
        finally:
            elapsed = self.clock() - start
            self._current = None
            self.totals_s[name] = self.totals_s.get(name, 0.0) + elapsed
            if self._step is not None:
                self._step_phases[name] = self._step_phases.get(name, 0.0) + elapsed
            self._tell(None)

    def start_step(self, step: int) -> None:
        if self._step is not None:
            raise ValueError(f"step {step} cannot start before end_step() of step {self._step}")
        self._step, self._step_phases, self._step_start = step, {}, self.clock()

    def abandon_step(self) -> None:
        """The step that runs, if any, will be started again; its time counts for the run only."""
        self._step = None

    def end_step(self) -> StepTiming:
        if self._step is None:
            raise ValueError("end_step() without start_step()")
        timing = StepTiming(step=self._step, total_s=self.clock() - self._step_start, phases_s=self._step_phases)
        self._step = None
        self.num_steps += 1
        self._steps_s += timing.total_s
        for name, seconds in timing.phases_s.items():
            self._in_steps_s[name] = self._in_steps_s.get(name, 0.0) + seconds
        return timing

    def breakdown(self) -> Breakdown:
        """The whole run so far, from the timer's construction, phases outside of steps included."""
        return Breakdown(total_s=self.clock() - self._run_start, phases_s=dict(self.totals_s), num_steps=self.num_steps)

    def step_breakdown(self) -> Breakdown:
        """The finished steps alone, without start-up and what lies between steps."""
        return Breakdown(total_s=self._steps_s, phases_s=dict(self._in_steps_s), num_steps=self.num_steps)

    def _tell(self, name: str | None) -> None:
        if self.on_phase is not None:
            self.on_phase(name)
