"""Whose failure counts when several train workers fail at once, and when one stands still. Ray is scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config
from ray.exceptions import ActorDiedError, RayTaskError

from slime_rl.cluster import train_calls as module
from slime_rl.cluster.errors import TrainWorkerLost, explain
from slime_rl.cluster.train_calls import Call


class ScriptedRay:
    """Calls are names; `outcomes` says how each ends, those without an outcome never do."""

    def __init__(self, **outcomes: Any) -> None:
        self.outcomes = outcomes

    def wait(self, calls: list[str], num_returns: int = 1, timeout: float | None = None) -> tuple[list[str], list[str]]:
        done = [call for call in calls if call in self.outcomes][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, calls: Any) -> Any:
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        if isinstance(self.outcomes[calls], Exception):
            raise self.outcomes[calls]
        return self.outcomes[calls]


class ScriptedPulse:
    def __init__(self, beating: bool) -> None:
        self.beating = beating

    def beats(self, timeout_s: float) -> bool:
        return self.beating


def failed(cause: Exception) -> Exception:
    return RayTaskError("train", "traceback of the worker", cause).as_instanceof_cause()


def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: ScriptedRay, *beating: bool) -> list[Any]:
    monkeypatch.setattr(module, "ray", ray)
    names = ["first", "second"]
    pulses: list[Any] = [ScriptedPulse(one) for one in beating]
    calls = [Call(f"{name} worker", name, pulse) for name, pulse in zip(names, pulses, strict=True)]
    return module.collect(calls, make_config(tmp_path, "--train-health-timeout-s", "0.2"))


def test_results_come_in_the_order_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect(tmp_path, monkeypatch, ScriptedRay(second=2, first=1), True, True) == [1, 2]


def test_a_lost_worker_counts_more_than_the_broken_collectives_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = failed(RuntimeError("Connection closed by peer"))
    with pytest.raises(TrainWorkerLost, match="second worker has died") as caught:
        collect(tmp_path, monkeypatch, ScriptedRay(first=broken, second=ActorDiedError()), True, True)
    message, is_users = explain(caught.value)
    assert "The actor died unexpectedly" not in message and "\x1b" not in message
    assert f"see {tmp_path}/run/logs" in message and not is_users


def test_a_worker_that_waited_for_a_lost_one_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = failed(ActorDiedError())
    with pytest.raises(TrainWorkerLost, match="second worker has died"):
        collect(tmp_path, monkeypatch, ScriptedRay(first=waited, second=ActorDiedError()), True, True)


def test_a_workers_own_words_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        collect(tmp_path, monkeypatch, ScriptedRay(first=failed(ValueError("--lr must be >= 0"))), True, True)
    assert explain(caught.value) == ("--lr must be >= 0", True)


def test_another_failure_without_a_loss_is_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        collect(tmp_path, monkeypatch, ScriptedRay(first=failed(RuntimeError("no kernel")), second=2), True, True)
    assert explain(caught.value) == ("RuntimeError: no kernel", False)


def test_a_worker_that_stands_still_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainWorkerLost, match=r"second worker has stood still for 0\.2 s \(--train-health-timeout-s\)"):
        collect(tmp_path, monkeypatch, ScriptedRay(first=1), True, False)
