"""Trackers that fail, or take their time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import pytest

from slime_rl.observability.background import InBackground


class Slow:
    """Waits at step 1 until told to go on, and refuses step 2."""

    def __init__(self) -> None:
        self.run_id = "mine"
        self.go_on = threading.Event()
        self.taken: list[tuple[int, Mapping[str, float]]] = []
        self.closed: bool | None = None
        self.threads = {threading.current_thread()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread())
        if step == 1:
            assert self.go_on.wait(60)
        if step >= 2:
            raise ConnectionError("server is away")
        self.taken.append((step, metrics))

    def close(self, failed: bool = False) -> None:
        self.threads.add(threading.current_thread())
        self.closed = failed


def test_nobody_waits_and_the_order_stays(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    made: list[threading.Thread] = []

    def make() -> Slow:
        made.append(threading.current_thread())
        slow.threads = {threading.current_thread()}
        return slow

    tracker = InBackground("wandb", make)
    metrics = {"a": 0.0}
    for step in range(4):  # would never end if it waited
        metrics["a"] = float(step)
        tracker.log(step, metrics)
    slow.go_on.set()
    with caplog.at_level(logging.WARNING):
        tracker.close(failed=True)
    assert slow.taken == [(0, {"a": 0.0}), (1, {"a": 1.0})]
    assert tracker.run_id == "mine" and slow.closed is True
    assert slow.threads == set(made)  # MLflow's active run is one of a thread
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "--trackers wandb: step 2 was not taken" in told[0] and "server is away" in told[0]
    assert told[1] == "--trackers wandb: did not take 2 of 4 lines"


def test_what_goes_wrong_on_opening_is_raised() -> None:
    def make() -> Slow:
        raise ValueError("--trackers wandb: nobody is logged in")

    with pytest.raises(ValueError, match="nobody is logged in"):
        InBackground("wandb", make)


def test_a_run_ends_though_its_tracker_does_not(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    tracker = InBackground("mlflow", lambda: slow)
    tracker.log(1, {})
    with caplog.at_level(logging.WARNING):
        tracker.close(timeout_s=0.1)
    slow.go_on.set()
    assert "--trackers mlflow: not done after 0.1 s" in caplog.text
