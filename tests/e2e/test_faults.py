"""A real run that loses an engine's scheduler and its train worker, goes on, and is ended by a signal."""

from __future__ import annotations

import signal
from pathlib import Path

from benchmarks.chaos_engines import ChaosRun, check


def test_a_run_survives_its_parts_and_leaves_nothing_when_it_is_ended(quickstart_data: Path, tmp_path: Path) -> None:
    run = ChaosRun(tmp_path, quickstart_data, num_steps=10_000)
    try:
        run.wait(lambda: run.steps() >= 2, "two steps")
        assert run.driver.poll() is None, (run.folder / "log").read_text()
        run.wait(lambda: bool(run.find("scheduler")), "a scheduler")
        first = min(run.find("scheduler"), key=lambda process: process.pid)  # a look may catch one as it forks
        first.kill()
        run.wait(lambda: any("serves again at http" in line for line in run.fault_lines()), "the engine's return")
        lines = run.fault_lines()
        assert any(" engine 0 " in line or " engine 1 " in line for line in lines)
        assert any("it gets no traffic before it has current weights" in line for line in lines)
        run.wait(lambda: bool(run.find("trainer")), "a train worker")
        worker = min(run.find("trainer"), key=lambda process: process.pid)
        worker.kill()
        run.wait(lambda: any("the train group goes on after step" in line for line in run.fault_lines()), "a restart")
        resumed = run.steps()
        run.wait(lambda: run.steps() >= resumed + 2, "two more steps")
        assert run.driver.poll() is None, (run.folder / "log").read_text()
    finally:
        run.driver.send_signal(signal.SIGTERM)
        code = run.driver.wait(timeout=600)
    assert code == 128 + signal.SIGTERM
    said = [line for line in (run.folder / "log").read_text().splitlines() if line.startswith("slime_rl:")]
    assert said == ["slime_rl: ended by SIGTERM; nothing is left running"]
    assert "SIGTERM received" not in (run.folder / "log").read_text()
    assert run.left_over() == []
    run.num_steps = run.steps() - 1  # the signal may have come between the last step's metrics and its samples
    lost, twice, stale = check(run)
    assert (lost, twice, stale) == (0, 0, 0)
