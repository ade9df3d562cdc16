"""However a run ends, each step of its checkpoint has its lines once: a kill or a signal at any line of the code
between the end of training and the next step, with real files and trainers that only write their step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl import train as train_module
from slime_rl.cluster import checkpoint, saver
from slime_rl.cluster.errors import TrainWorkerLost
from slime_rl.cluster.saver import Saver
from slime_rl.cluster.signals import leave_on_signals
from slime_rl.config import Config
from slime_rl.observability import tracker
from slime_rl.observability.timers import PhaseTimer
from slime_rl.observability.tracker import make_trackers, read_jsonl
from slime_rl.train import Run, train
from slime_rl.types import Sample

NUM_STEPS, KILLED_STEP = 3, 1
STRIDE = 11  # lines from one kill to the next
CODE = {module.__file__ for module in (train_module, checkpoint, saver, tracker)}
Act = Callable[[], None]


class Trainers:
    """Stands for a train group, and for the rollout manager's save."""

    def save(self, path: str, step: int = 0) -> None:
        path = f"{path}/weights" if step else path
        Path(path).write_text(str(step))

    begin_save = save

    def save_is_written(self) -> bool:
        return True

    def finish_save(self) -> None:
        pass

    def train(self, step: int, *_: Any) -> dict[str, float]:
        return {"train/loss": 1.0}

    def token_log(self) -> dict[int, Any]:
        return {}


class Rollout:
    """Generates nothing; tells when step KILLED_STEP is committed and the next one asked for."""

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch

    def take(self, step: int) -> dict[str, Any]:
        if self.watch is not None and step == KILLED_STEP + 1:
            self.watch.end()
        samples = [Sample(index=0, group_index=0, rollout_id=0, prompt="1+1=")]
        return {"batch": None, "metrics": {}, "samples": samples, "texts": []}

    def commit(self, step: int) -> None:
        if self.watch is not None and step == KILLED_STEP:
            self.watch.begin()

    def begin(self, method: str) -> str:
        return method

    def wait(self, reference: str) -> Any:
        return {"eval/held/accuracy": 0.5}, [Sample(index=0, group_index=0, rollout_id=0, prompt="1+2=")]

    def has_ended(self, reference: str) -> bool:
        return True

    def submit_through(self, step: int) -> None:
        pass

    weights_are = submit_through


class Watch:
    """Counts the lines of code that are run from `begin` to `end`, and acts before one of them."""

    def __init__(self, act: Act = lambda: None, at: int | None = None) -> None:
        self.act, self.at, self.count = act, at, 0

    def begin(self) -> None:
        sys.settrace(self._call)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # the functions that are under way
            frame.f_trace = self._call(frame, "call", None)
            frame = frame.f_back

    def end(self) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename in CODE else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and sys.gettrace() is not None:
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.act()
        return self._line


def newest_checkpoint(config: Config) -> int | None:
    """Its finished steps, if there is one."""
    is_there = (config.checkpoint_dir / "latest").exists()
    return checkpoint.CheckpointStore(config.checkpoint_dir, keep=1).latest()[1].step if is_there else None


def run_of(
    config: Config,
    watch: Watch | None = None,
    sync: Callable[[int], Any] = lambda version: {},
    on_restart: Callable[[TrainWorkerLost], None] = lambda error: None,
) -> int:
    """A run that begins, or continues from the checkpoint that is there."""
    trainers, rollout = Trainers(), Rollout(watch)
    start = newest_checkpoint(config)
    cluster = SimpleNamespace(
        restore=lambda: start or 0, rollout=rollout, actor=trainers, critic=None, training=contextlib.nullcontext,
        fault_metrics=dict, sync_weights=sync, saver=Saver(config, trainers, SimpleNamespace(save=trainers.save)),
    )  # fmt: skip
    cluster.save = cluster.saver.save

    def restart(error: TrainWorkerLost) -> int:
        on_restart(error)
        return (cluster.saver.newest or (None, 0))[1]

    cluster.restart_trainers = restart
    quiet: Any = SimpleNamespace(step=lambda *_: None, message=lambda _: None, evaluation=lambda *_: None)
    with make_trackers(config, start) as trackers:
        run = Run(config, cluster, trackers, quiet, PhaseTimer(), SimpleNamespace(peak_gib=1.0))  # type: ignore[arg-type]
        return train(run)


def in_a_child(work: Act) -> int:
    """Exit code of a fork that does it."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lines(config: Config) -> tuple[list[int], list[int], list[int], list[int]]:
    """Steps of the lines: of training and evaluation, in metrics.jsonl and samples.jsonl."""
    metrics = read_jsonl(config.run_dir / "metrics.jsonl")
    samples = read_jsonl(config.run_dir / "samples.jsonl")
    return (
        [line["step"] for line in metrics if "train/loss" in line],
        [line["step"] for line in metrics if "train/loss" not in line],
        [line["step"] for line in samples if line["kind"] == "training"],
        [line["step"] for line in samples if line["kind"] == "evaluation"],
    )


EVERY_STEP, EVERY_EVALUATION = list(range(NUM_STEPS)), list(range(NUM_STEPS + 1))


def config_for(folder: Path, *flags: str) -> Config:
    folder.mkdir(exist_ok=True)
    held = write_prompts(folder / "held.jsonl")
    evaluation = ("--eval-prompt-data", "held", str(held), "--eval-interval", "1")
    return make_config(folder, "--num-steps", str(NUM_STEPS), "--save-interval", "1", *evaluation, *flags)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("flags", [(), ("--async-save",), ("--async-save", "--colocate", "--device", "cpu")])
@pytest.mark.parametrize("kill", [lambda: os._exit(9), interrupt], ids=["kill", "signal"])
def test_each_step_has_its_lines_once_wherever_the_run_is_ended(
    tmp_path: Path, kill: Act, flags: tuple[str, ...]
) -> None:
    whole, watch = config_for(tmp_path / "whole", *flags), Watch()
    assert run_of(whole, watch) == NUM_STEPS
    expected = (EVERY_STEP, EVERY_EVALUATION, EVERY_STEP, EVERY_EVALUATION)
    assert lines(whole) == expected and watch.count > 100
    for at in range(1, watch.count + 1, STRIDE):
        config = config_for(tmp_path / str(at), *flags)

        def killed(config: Config = config, at: int = at) -> None:
            leave_on_signals()
            with contextlib.suppress(KeyboardInterrupt):
                run_of(config, Watch(kill, at))

        assert in_a_child(killed) == (0 if kill is interrupt else 9)
        saved = newest_checkpoint(config) or 0
        training, _, samples, _ = lines(config)
        assert training[:saved] == samples[:saved] == EVERY_STEP[:saved], f"line {at}: {saved} steps are saved"
        assert run_of(config) == NUM_STEPS
        assert lines(config) == expected, f"killed at line {at}, {saved} steps saved"


def losing_a_worker_at(lost: int) -> Callable[[int], dict[str, float]]:
    """A weight sync that loses a train worker, once, at version `lost`."""
    left = [lost]

    def sync(version: int) -> dict[str, float]:
        if version in left:
            left.remove(version)
            raise TrainWorkerLost("train worker 0 has died")
        return {}

    return sync


def test_a_step_whose_trainer_is_lost_after_its_save_stays_logged(tmp_path: Path) -> None:
    config, sync = config_for(tmp_path), losing_a_worker_at(2)

    assert run_of(config, sync=sync) == NUM_STEPS
    assert lines(config) == (EVERY_STEP, EVERY_EVALUATION, EVERY_STEP, EVERY_EVALUATION)


def test_a_loss_while_the_trainers_are_restarted_is_another_restart(tmp_path: Path) -> None:
    """A node that does not come back soon; without a restart left the reason ends the run."""
    config, sync = config_for(tmp_path), losing_a_worker_at(2)

    def no_place_twice(error: TrainWorkerLost) -> None:
        reasons.append(str(error))
        if len(reasons) < 3:
            raise TrainWorkerLost(f"no place {len(reasons)}")

    reasons: list[str] = []
    assert run_of(config, sync=sync, on_restart=no_place_twice) == NUM_STEPS
    assert reasons == ["train worker 0 has died", "no place 1", "no place 2"]
    assert lines(config) == (EVERY_STEP, EVERY_EVALUATION, EVERY_STEP, EVERY_EVALUATION)


def test_a_tracker_that_fails_does_not_keep_the_steps_from_being_saved(tmp_path: Path) -> None:
    class Failing:
        def log(self, step: int, metrics: Any) -> None:
            if "train/loss" in metrics and step == 1:
                raise ConnectionError("no answer")

        def close(self, failed: bool = False) -> None:
            pass

    config = config_for(tmp_path, "--save-interval", "3")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(tracker, "open_trackers", lambda *_, **__: [Failing()])
        run_of(config)
    assert (config.checkpoint_dir / "latest").read_text() == "step_00000002"
    assert lines(config)[0] == lines(config)[2] == [0, 1]
