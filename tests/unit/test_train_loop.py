"""The order in which the one loop calls its parts, in every mode."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.cluster.errors import TrainWorkerLost
from slime_rl.observability.timers import PhaseTimer
from slime_rl.train import Run, train


class Recorder:
    """Any method of it notes its name and arguments, and gives what `answers` has for it."""

    def __init__(self, name: str, calls: list[str], answers: dict[str, Any]) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **_: Any) -> Any:
            shown = [str(arg) for arg in args if isinstance(arg, int)]
            self._calls.append(f"{self._name}{method}({', '.join(shown)})")
            return self._answers.get(method)

        return call


class RolloutRecorder(Recorder):
    """Notes what is begun; each look whether it has ended gives the next of `ends`, and then True."""

    ends: list[bool]

    def begin(self, method: str) -> str:
        self._calls.append(f"{method}()")
        return method

    def has_ended(self, reference: str) -> bool:
        return self.ends.pop(0) if self.ends else True

    def wait(self, reference: str) -> Any:
        self._calls.append("waited")
        return self._answers[reference]


def calls_of(tmp_path: Path, *flags: str, start: int = 0, ends: tuple[bool, ...] = ()) -> list[str]:
    held = write_prompts(tmp_path / "held.jsonl")
    sizes = () if "--num-steps" in flags else ("--num-steps", "3")
    config = make_config(tmp_path, *sizes, "--eval-prompt-data", "held", str(held), *flags)
    calls: list[str] = []
    taken = {"batch": None, "metrics": {}, "samples": [], "texts": []}
    rollout = RolloutRecorder("", calls, {"take": taken, "evaluate": ({"eval/held/accuracy": 0.5}, [])})
    rollout.ends = list(ends)
    cluster = Recorder("", calls, {"restore": start, "sync_weights": {}})
    cluster.training = contextlib.nullcontext
    cluster.fault_metrics = dict
    cluster.rollout = rollout
    cluster.actor = Recorder("", calls, {"train": {}, "token_log": {}})
    cluster.critic = Recorder("critic.", calls, {}) if config.critic_is_apart else None
    cluster.saver = Recorder("", [], {})
    quiet = Recorder("", [], {})
    run = Run(config, cluster, quiet, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
    assert train(run) == config.train.num_steps
    return calls


class StopsAtStepTwo(RolloutRecorder):
    """Its third step is never generated."""

    def take(self, step: int) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return self._answers["take"]


def stopped(tmp_path: Path, *flags: str, in_training: bool = False) -> list[str]:
    """The saves of a run of 5 steps that is interrupted while it generates (or trains) its third step."""
    calls: list[str] = []
    config = make_config(tmp_path, "--num-steps", "5", *flags)
    taken = {"batch": None, "metrics": {}, "samples": [], "texts": []}
    cluster = Recorder("", calls, {"restore": 0, "sync_weights": {}})
    cluster.training, cluster.fault_metrics, cluster.critic = contextlib.nullcontext, dict, None
    cluster.rollout = (RolloutRecorder if in_training else StopsAtStepTwo)("", [], {"take": taken})

    def train_step(step: int, *_: Any) -> dict[str, float]:
        if step == 2:
            raise KeyboardInterrupt
        return {}

    cluster.actor = Recorder("", [], {"token_log": {}})
    cluster.actor.train = train_step
    cluster.saver, quiet = Recorder("saver.", calls, {"complete": 2}), Recorder("", [], {})
    run = Run(config, cluster, quiet, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        train(run)
    return [call for call in calls if call.startswith(("save(", "saver.c", "saver.w"))]


def test_finished_steps_are_saved_when_the_run_is_ended_between_two_checkpoints(tmp_path: Path) -> None:
    assert stopped(tmp_path, "--save-interval", "4") == ["save(2)", "saver.wait()"]
    assert stopped(tmp_path) == []  # this run keeps no checkpoints


@pytest.mark.parametrize("in_training", [False, True])
def test_a_save_that_is_under_way_when_the_run_is_ended_is_made_whole(tmp_path: Path, in_training: bool) -> None:
    saves = stopped(tmp_path, "--save-interval", "2", "--async-save", in_training=in_training)
    assert saves == ["save(2)", "saver.complete()"]  # once, as it was due
    saves = stopped(tmp_path, "--save-interval", "4", in_training=True)
    assert saves == ["saver.complete()"], "no save of weights that may be half updated"


def test_a_signal_that_waited_for_a_poll_loses_no_step(tmp_path: Path) -> None:
    def poll() -> None:
        raise KeyboardInterrupt

    calls: list[str] = []
    config = make_config(tmp_path, "--num-steps", "5", "--save-interval", "4")
    cluster = Recorder("", calls, {"restore": 0, "sync_weights": {}})
    cluster.training, cluster.critic = contextlib.nullcontext, None
    cluster.rollout = Recorder("", [], {"take": {"batch": None, "metrics": {}, "samples": [], "texts": []}})
    cluster.actor, cluster.saver, quiet = (Recorder("", [], {"train": {}, "token_log": {}}) for _ in range(3))
    cluster.saver.poll = poll
    run = Run(config, cluster, quiet, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert calls[-1] == "save(1)"


def test_a_run_that_ends_early_at_its_accuracy_saves_its_last_step(tmp_path: Path) -> None:
    held, accuracies = write_prompts(tmp_path / "held.jsonl"), [0.1, 0.2, 0.6]
    flags = ["--eval-prompt-data", "held", str(held), "--stop-at-eval-accuracy", "0.5", "--eval-interval", "1"]
    config = make_config(tmp_path, "--num-steps", "9", "--save-interval", "4", *flags)
    calls: list[str] = []
    cluster = Recorder("", calls, {"restore": 0, "sync_weights": {}})
    cluster.training, cluster.fault_metrics, cluster.critic = contextlib.nullcontext, dict, None
    cluster.rollout = RolloutRecorder("", [], {"take": {"batch": None, "metrics": {}, "samples": [], "texts": []}})
    cluster.rollout.wait = lambda _: ({"eval/held/accuracy": accuracies.pop(0)}, [])
    cluster.actor, quiet = Recorder("", [], {"train": {}, "token_log": {}}), Recorder("", [], {})
    cluster.saver = Recorder("saver.", calls, {})
    run = Run(config, cluster, quiet, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
    assert train(run) == 2
    assert calls[-3:] == ["save(2)", "saver.publish()", "saver.wait()"]


BEFORE = ["restore()", "sync_weights(0)", "weights_are(0)", "evaluate()", "waited"]


@pytest.mark.parametrize(
    ("flags", "ahead"),
    [([], 0), (["--rollout-ahead", "1"], 1), (["--fully-async", "--max-staleness", "2"], 0)],
)
def test_a_step_is_taken_trained_committed_and_its_weights_sent(tmp_path: Path, flags: list[str], ahead: int) -> None:
    expected = list(BEFORE)
    for step in range(3):
        expected += [
            f"submit_through({step + ahead})",
            f"take({step})",
            f"train({step})",
            "token_log()",
            f"commit({step})",
        ]
        expected += [f"sync_weights({step + 1})", f"weights_are({step + 1})"]
    assert calls_of(tmp_path, *flags) == [*expected, "evaluate()", "waited"]


def test_a_critic_apart_begins_its_step_first(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, "--advantage-estimator", "gae", "--critic-num-workers", "1")
    first = calls.index("critic.train(0)")
    assert calls[first - 1 : first + 3] == ["take(0)", "critic.train(0)", "train(0)", "token_log()"]


def test_a_checkpoint_is_taken_at_the_trained_frontier(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, "--save-interval", "2")
    first = calls.index("save(2)")
    assert calls[first - 3 : first] == ["train(1)", "token_log()", "commit(1)"]
    assert calls[first + 1 : first + 4] == ["sync_weights(2)", "weights_are(2)", "submit_through(2)"]
    assert "save(1)" not in calls and calls[-5:-1] == ["save(3)", "sync_weights(3)", "weights_are(3)", "evaluate()"]


def test_a_resumed_run_sends_its_weights_before_anything_is_generated(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, start=2)
    before = ["restore()", "sync_weights(2)", "weights_are(2)", "evaluate()", "waited"]
    assert calls[:6] == [*before, "submit_through(2)"]
    assert calls.count("take(2)") == 1 and "take(1)" not in calls


def step_calls(step: int) -> list[str]:
    return [f"submit_through({step})", f"take({step})", f"train({step})", "token_log()", f"commit({step})"]


def weights(version: int) -> list[str]:
    return [f"sync_weights({version})", f"weights_are({version})"]


ASYNC = ("--fully-async", "--max-staleness", "1", "--eval-interval", "1", "--num-steps", "4")


def test_training_goes_on_during_an_evaluation_whose_weights_stay_as_long_as_the_bound_allows(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, *ASYNC, "--eval-interval", "2", "--num-steps", "5", ends=(False, False, False))
    assert calls == [
        *(*BEFORE, *step_calls(0), *weights(1), *step_calls(1), *weights(2), "evaluate()"),
        *(*step_calls(2), "hold_back(3)"),  # step 3 may train on tokens of version 2, step 4 may not
        *(*step_calls(3), "hold_back(4)", "waited", *weights(4), "evaluate()"),
        *(*step_calls(4), "hold_back(5)", "waited", *weights(5), "evaluate()", "waited"),
    ]


def test_an_evaluation_that_has_ended_does_not_hold_the_weights(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, *ASYNC, "--num-steps", "2")
    step_1 = [*step_calls(1), "waited", *weights(2), "evaluate()", "waited"]
    assert calls == [*BEFORE, *step_calls(0), *weights(1), "evaluate()", *step_1]


@pytest.mark.parametrize(
    "flags", [("--eval-interval", "1"), (*ASYNC, "--max-staleness", "0"), (*ASYNC, "--colocate", "--device", "cpu")]
)
def test_other_modes_wait_for_an_evaluation(tmp_path: Path, flags: tuple[str, ...]) -> None:
    calls = calls_of(tmp_path, *flags, "--num-steps", "2")
    assert calls[-11:] == ["evaluate()", "waited", *step_calls(1), *weights(2), "evaluate()", "waited"]


def test_only_evaluating_is_one_evaluation_and_no_step(tmp_path: Path) -> None:
    assert calls_of(tmp_path, "--num-steps", "0") == BEFORE


@pytest.mark.parametrize(("back_to", "lines"), [(2, [0, 1, 2]), (1, [0, 1, 1, 2])])
def test_a_step_whose_weights_were_not_sent_has_its_lines_if_it_is_saved(
    tmp_path: Path, back_to: int, lines: list[int]
) -> None:
    """A train worker is lost after step 1 was saved, or before: `rewind` takes what is repeated out of the files."""
    logged: list[str] = []
    lost = [True]

    def sync_weights(version: int) -> dict[str, float]:
        if version == 2 and lost and lost.pop():
            raise TrainWorkerLost("train worker 0 has died")
        return {}

    config = make_config(tmp_path, "--num-steps", "3", "--save-interval", "1")
    taken = {"batch": None, "metrics": {}, "samples": [], "texts": []}
    cluster = Recorder("", [], {"restore": 0, "restart_trainers": back_to})
    cluster.training, cluster.fault_metrics, cluster.sync_weights = contextlib.nullcontext, dict, sync_weights
    cluster.rollout = RolloutRecorder("", [], {"take": taken})
    cluster.rollout.ends = []
    cluster.actor = Recorder("", [], {"train": {}, "token_log": {}})
    cluster.critic, cluster.saver = None, Recorder("", [], {})
    quiet, trackers = Recorder("", [], {}), Recorder("", logged, {})
    run = Run(config, cluster, trackers, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
    assert train(run) == 3
    assert [line for line in logged if line.startswith(("log(", "rewind("))] == [
        *(f"log({step})" for step in lines[:2]),
        f"rewind({back_to})",
        *(f"log({step})" for step in lines[2:]),
    ]
