"""What the driver does when engines and train workers are lost, with parts that only remember what they were told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.cluster.cluster import Cluster
from slime_rl.cluster.errors import NoRestartLeft, TrainWorkerLost
from slime_rl.engine.guard import EngineState
from slime_rl.weight_sync.report import SyncReport


class Guard:
    def __init__(self) -> None:
        self.stale: list[str] = []
        self.failure: RuntimeError | None = None
        self.num_restarts = {"engine": 0, "router": 0}
        self.num_slow = 0

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def urls(self, *states: EngineState) -> list[str]:
        return list(self.stale) if states == (EngineState.STALE,) else []

    def report(self, url: str, reason: str) -> None: ...


class Engines:
    """`answers` are the URLs that can be updated, for each time that somebody asks."""

    def __init__(self, log: list[Any], answers: list[list[str]]) -> None:
        self.guard, self.log, self.answers = Guard(), log, answers

    def updatable(self) -> list[str]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def settle(self, version: int, updated: list[str], failed: dict[str, str]) -> None:
        self.log.append(("settle", version, updated, sorted(failed)))


class Trainers:
    """`lost` are the URLs that fail in the next weight update."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.lost = log, set()

    def sync_weights(self, version: int, urls: list[str]) -> SyncReport:
        self.log.append(("send", version, urls))
        failed = {url: "gone" for url in urls if url in self.lost}
        self.lost = set()
        updated = [url for url in urls if url not in failed]
        return SyncReport(
            version=version,
            num_tensors=1,
            num_bytes=4,
            seconds=0.1,
            updated=updated,
            failed=failed,
            changed_share=1.0,
        )

    def change_engine_memory(self, action: str, urls: list[str], released: dict[str, set[str]]) -> Any:
        self.log.append((action, urls))
        return ({url: {"weights"} for url in urls} if action == "release" else {}), {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.log.append((name, *args))


class Noting:
    """A part whose every method only notes its call."""

    def __init__(self, log: list[Any], **fields: Any) -> None:
        self.__dict__.update(fields, log=log)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.log.append((name, *args))


def make(tmp_path: Path, *flags: str, answers: list[list[str]] | None = None) -> tuple[Any, list[Any]]:
    log: list[Any] = []
    cluster: Any = Cluster(make_config(tmp_path, *flags))
    cluster.engines, cluster.actor = Engines(log, answers or [["a", "b"]]), Trainers(log)
    cluster.rollout, cluster.saver = Noting(log), Noting(log, newest=None, poll=lambda: None)
    return cluster, log


def test_an_update_is_repeated_until_an_engine_has_it(tmp_path: Path) -> None:
    cluster, log = make(tmp_path, answers=[["a", "b"], ["b"]])
    cluster.actor.lost = {"a", "b"}
    metrics = cluster.sync_weights(3)
    assert log == [
        ("send", 3, ["a", "b"]),
        ("settle", 3, [], ["a", "b"]),
        ("send", 3, ["b"]),
        ("settle", 3, ["b"], []),
    ]
    assert metrics["sync/bytes"] == 4


def test_waiting_for_engines_ends_when_the_guard_gives_up(tmp_path: Path) -> None:
    cluster, _ = make(tmp_path, answers=[[]])
    cluster.engines.guard.failure = RuntimeError("engine 0 is gone for good")
    with pytest.raises(RuntimeError, match="engine 0 is gone for good"):
        cluster.sync_weights(1)


def test_a_restarted_engine_is_brought_up_to_date_only_while_the_trainer_has_its_weights(tmp_path: Path) -> None:
    cluster, log = make(tmp_path)
    cluster.engines.guard.stale = ["c"]
    cluster._look_after()
    assert log == [], "nothing was sent yet, so nobody knows what the engines serve"
    cluster.sync_weights(2)
    log.clear()
    cluster._look_after()
    assert log == [("send", 2, ["c"]), ("settle", 2, ["c"], [])]
    log.clear()
    with cluster.training():
        cluster._look_after()
    cluster._look_after()
    assert log == [], "the trainer has gone on"
    cluster.sync_weights(3)
    log.clear()
    cluster._look_after()
    assert log[0] == ("send", 3, ["c"])


def test_weights_that_are_held_back_go_out_when_an_engine_comes_back_without_any(tmp_path: Path) -> None:
    """The old ones are with nobody any more, and an engine without weights would never answer."""
    cluster, log = make(tmp_path)
    cluster.sync_weights(2)
    with cluster.training():
        pass
    cluster.hold_back(3)
    log.clear()
    cluster._look_after()
    assert log == []
    cluster.engines.guard.stale = ["c"]
    cluster._look_after()
    assert [entry[:2] for entry in log] == [("send", 3), ("settle", 3)]
    log.clear()
    cluster._look_after()
    assert log[0] == ("send", 3, ["c"]), "as after any other update"
    with cluster.training():
        log.clear()
        cluster._look_after()
    assert log == []


def test_trainer_and_engines_take_turns(tmp_path: Path) -> None:
    cluster, log = make(tmp_path, "--colocate", answers=[["a"]])
    cluster.sync_weights(0)
    log.clear()
    with cluster.training():
        log.append("train")
    cluster.sync_weights(1)
    assert log == [
        ("release", ["a"]),
        ("onload",),
        "train",
        ("resume_weights", ["a"]),
        ("send", 1, ["a"]),
        ("settle", 1, ["a"], []),
        ("offload",),
        ("resume_rest", []),
    ]


def test_with_colocation_a_save_has_the_trainer_on_the_devices(tmp_path: Path) -> None:
    """A run that is left while engines generate: offloaded weights are storages without a byte."""
    cluster, log = make(tmp_path, "--colocate", "--device", "cpu")
    cluster.save(3)
    assert log == [("release", ["a", "b"]), ("onload",), ("save", 3)]


def test_without_colocation_nothing_is_given_back(tmp_path: Path) -> None:
    cluster, log = make(tmp_path)
    with cluster.training():
        pass
    assert log == []


def test_a_lost_trainer_takes_the_run_back_to_its_newest_checkpoint(tmp_path: Path) -> None:
    cluster, log = make(tmp_path, "--max-restarts", "2")
    cluster._loaded = (Path("/old/step_00000004"), 4)
    assert cluster.restart_trainers(TrainWorkerLost("train worker 0 has died")) == 4
    assert [entry[0] for entry in log] == ["give_up", "halt", "restart", "load", "restore"]
    assert log[3:] == [("load", "/old/step_00000004/model"), ("restore", "/old/step_00000004/buffer.json", 4)]
    cluster.saver.__dict__["newest"] = (Path("/run/step_00000006"), 6)
    assert cluster.restart_trainers(TrainWorkerLost("train worker 0 has died")) == 6
    with pytest.raises(NoRestartLeft, match="worker 1 has died; --max-restarts 2 allows no further restart"):
        cluster.restart_trainers(TrainWorkerLost("train worker 1 has died"))
    assert log[-1] == ("give_up",), "a checkpoint that only lacks its checksums is made whole"
    assert cluster.fault_metrics()["faults/train_restarts"] == 2
    assert "train worker 0 has died; restarting" in (tmp_path / "run" / "logs" / "faults.log").read_text()


def test_the_loss_of_either_train_group_takes_both_back(tmp_path: Path) -> None:
    cluster, log = make(tmp_path)
    cluster.critic = Noting(log)
    cluster._loaded = (Path("/old/step_00000004"), 4)
    assert cluster.restart_trainers(TrainWorkerLost("critic worker 0 has died")) == 4
    assert [entry[0] for entry in log] == ["give_up", "halt", "restart", "restart", "load", "load", "restore"]


def test_before_the_first_checkpoint_it_starts_over(tmp_path: Path) -> None:
    cluster, log = make(tmp_path)
    assert cluster.restart_trainers(TrainWorkerLost("train worker 0 has died")) == 0
    assert log[-1] == ("restore", None, 0)
    assert "load" not in [entry[0] for entry in log]
