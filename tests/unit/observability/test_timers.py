from __future__ import annotations

import pytest

from slime_rl.observability.timers import PhaseTimer


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_step_report_has_seconds_per_phase_and_the_time_in_none() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    timer.start_step(3)
    for name, seconds in (("rollout", 2.0), ("train", 1.0), ("rollout", 0.5)):
        with timer.phase(name):
            clock.now += seconds
        clock.now += 0.25
    timing = timer.end_step()
    assert timing.step == 3
    assert timing.phases_s == {"rollout": 2.5, "train": 1.0}
    assert timing.other_s == pytest.approx(0.75)
    assert timing.metrics() == pytest.approx(
        {"timing_s/rollout": 2.5, "timing_s/train": 1.0, "timing_s/other": 0.75, "perf/step_s": 4.25}
    )


def test_run_breakdown_holds_start_up_and_the_step_breakdown_does_not() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("start"):
        clock.now += 10.0
    for step in range(2):
        timer.start_step(step)
        with timer.phase("train"):
            clock.now += 3.0
        clock.now += 1.0
        timer.end_step()
    run, steps = timer.breakdown(), timer.step_breakdown()
    assert (run.total_s, run.phases_s, run.num_steps) == (18.0, {"start": 10.0, "train": 6.0}, 2)
    assert run.rows()[0] == ("start", 10.0, pytest.approx(10 / 18), 5.0)
    assert run.rows()[-1] == ("other", 2.0, pytest.approx(2 / 18), 1.0)
    assert (steps.total_s, steps.phases_s, steps.overhead_share) == (8.0, {"train": 6.0}, 0.25)
    assert "| train | 6.00 | 75.0 % | 3.000 s |" in steps.table()
    assert "| **total** | 8.00 | 100.0 % | 4.000 s |" in steps.table()


def test_time_of_a_phase_that_raises_counts_and_the_next_can_start() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    timer.start_step(0)
    with pytest.raises(RuntimeError, match="boom"), timer.phase("train"):
        clock.now += 1.0
        raise RuntimeError("boom")
    with timer.phase("save"):
        clock.now += 2.0
    assert timer.end_step().phases_s == {"train": 1.0, "save": 2.0}


def test_phases_do_not_nest() -> None:
    timer = PhaseTimer()
    expected = pytest.raises(ValueError, match="'save' cannot start inside phase 'train'")
    with timer.phase("train"), expected, timer.phase("save"):
        pass


@pytest.mark.parametrize("name", ["other", ""])
def test_reserved_phase_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="reserved"), PhaseTimer().phase(name):
        pass


def test_steps_start_and_end_in_turn() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="without start_step"):
        timer.end_step()
    timer.start_step(0)
    with pytest.raises(ValueError, match="step 1 cannot start before"):
        timer.start_step(1)


def test_listener_hears_begin_and_end_of_every_phase() -> None:
    heard: list[str | None] = []
    timer = PhaseTimer(on_phase=heard.append)
    with timer.phase("rollout"):
        pass
    with timer.phase("train"):
        pass
    assert heard == ["rollout", None, "train", None]


def test_breakdown_of_a_run_without_steps_divides_by_nothing() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    assert timer.step_breakdown().overhead_share == 0.0
    assert timer.step_breakdown().rows() == [("other", 0.0, 0.0, 0.0)]
