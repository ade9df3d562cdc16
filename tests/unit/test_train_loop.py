"""The order in which the one loop calls its parts, in every mode."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.observability.timers import PhaseTimer
from slime_rl.train import Run, train


class Recorder:
    """Any method of it notes its name and arguments, and gives what `answers` has for it."""

    def __init__(self, name: str, calls: list[str], answers: dict[str, Any]) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            shown = [str(arg) for arg in args if isinstance(arg, int)]
            self._calls.append(f"{self._name}{method}({', '.join(shown)})")
            return self._answers.get(method)

        return call


def calls_of(tmp_path: Path, *flags: str, start: int = 0) -> list[str]:
    held = write_prompts(tmp_path / "held.jsonl")
    config = make_config(tmp_path, "--num-steps", "3", "--eval-prompt-data", "held", str(held), *flags)
    calls: list[str] = []
    taken = {"shards": [], "metrics": {}, "samples": [], "texts": []}
    rollout = Recorder("", calls, {"take": taken, "evaluate": ({"eval/held/accuracy": 0.5}, [])})
    cluster = Recorder("", calls, {"restore": start, "sync_weights": {}})
    cluster.training = contextlib.nullcontext
    cluster.fault_metrics = dict
    cluster.rollout = rollout
    cluster.actor = Recorder("", calls, {"train": {}})
    cluster.saver = Recorder("", [], {})
    quiet = Recorder("", [], {})
    run = Run(config, cluster, quiet, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
    assert train(run) == 3
    return calls


BEFORE = ["restore()", "sync_weights(0)", "weights_are(0)", "evaluate()"]


@pytest.mark.parametrize(
    ("flags", "ahead"),
    [([], 0), (["--rollout-ahead", "1"], 1), (["--fully-async", "--max-staleness", "2"], 0)],
)
def test_a_step_is_taken_trained_committed_and_its_weights_sent(tmp_path: Path, flags: list[str], ahead: int) -> None:
    expected = list(BEFORE)
    for step in range(3):
        expected += [f"submit_through({step + ahead})", f"take({step})", f"train({step})", f"commit({step})"]
        expected += [f"sync_weights({step + 1})", f"weights_are({step + 1})"]
    assert calls_of(tmp_path, *flags) == [*expected, "evaluate()"]


def test_a_checkpoint_is_taken_at_the_trained_frontier(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, "--save-interval", "2")
    first = calls.index("save(2)")
    assert calls[first - 2 : first] == ["train(1)", "commit(1)"]
    assert calls[first + 1 : first + 4] == ["sync_weights(2)", "weights_are(2)", "submit_through(2)"]
    assert "save(1)" not in calls and calls[-4:] == ["save(3)", "sync_weights(3)", "weights_are(3)", "evaluate()"]


def test_a_resumed_run_sends_its_weights_before_anything_is_generated(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, start=2)
    assert calls[:5] == ["restore()", "sync_weights(2)", "weights_are(2)", "evaluate()", "submit_through(2)"]
    assert calls.count("take(2)") == 1 and "take(1)" not in calls
