"""What goes from the workers of one train group to those of another. Ray is scripted: a reference is what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config

from slime_rl.cluster import train_group as module
from slime_rl.cluster.errors import TrainWorkerLost
from slime_rl.cluster.train_group import CriticGroup, StepBatch, TrainGroup


class Actor:
    """Notes its calls in `log`; a reference is "worker.method"."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> str:
            what = args[0] if method == "compute" else method
            self.log.append((f"{self.name}.{what}", *args))
            return f"{self.name}.{what}"

        return SimpleNamespace(remote=remote)


def make_groups(tmp_path: Path, log: list[Any], *flags: str) -> tuple[TrainGroup, CriticGroup]:
    """Policy workers of data-parallel ranks 0, 0, 1, 1 (two hold one model), critic workers of 0, 1."""
    config = make_config(tmp_path, "--advantage-estimator", "gae", "--critic-num-workers", "2", *flags)
    policy, critic = TrainGroup.__new__(TrainGroup), CriticGroup.__new__(CriticGroup)
    for group, name, ranks in ((policy, "p", [0, 0, 1, 1]), (critic, "c", [0, 1])):
        group.config, group.pulses, group.data_parallel_ranks, group._planning = config, [], ranks, []
        group._failed_save = None
        group.actors = [Actor(f"{name}{i}", log) for i in range(len(ranks))]
    critic.policy = policy
    return policy, critic


BATCH = StepBatch(policy=["pb0", "pb1"], critic=["cb0", "cb1"])


@pytest.mark.parametrize(("flags", "critic_waits"), [((), False), (("--kl-coef", "0.1"), True)])
def test_values_go_to_the_policy_and_log_probs_to_the_critic_only_where_rewards_hold_kl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], critic_waits: bool
) -> None:
    log: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "collect", lambda calls, config: [{call.who: 1.0} for call in calls])
    policy, critic = make_groups(tmp_path, log, *flags)
    step = critic.train(7, BATCH)
    values, log_probs = (
        ["c0.compute_values", "c1.compute_values"],
        ["p1.compute_token_fields", "p3.compute_token_fields"],
    )
    assert step.given == values + log_probs
    assert [call[1:] for call in log if call[0] == "c1.train"] == [
        (7, "cb1", values + log_probs if critic_waits else values)
    ]
    assert not any(call[0].endswith("p0.train") for call in log), "the policy trains when it is told to"
    metrics = policy.train(7, BATCH, step)
    shards = {call[0]: call[1:] for call in log if call[0].startswith("p") and call[0].endswith(".train")}
    assert shards == {f"p{i}.train": (7, f"pb{i // 2}", values + log_probs) for i in range(4)}
    assert metrics == {"critic worker 0": 1.0, "train worker 3": 1.0}


def test_a_policy_alone_is_given_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "collect", lambda calls, config: [{"who": call.who} for call in calls])
    policy, _ = make_groups(tmp_path, log)
    assert policy.train(0, BATCH) == {"who": "train worker 0"}
    assert [call[1:] for call in log] == [(0, "pb0", []), (0, "pb0", []), (0, "pb1", []), (0, "pb1", [])]


def test_a_save_is_planned_without_waiting_and_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that fails in planning never meets the others in a training step."""
    log: list[tuple[Any, ...]] = []
    waited: list[list[str]] = []
    ready: list[str] = []
    monkeypatch.setattr(module, "collect", lambda calls, _: waited.append([c.reference for c in calls]) or [True])
    monkeypatch.setattr(module.ray, "wait", lambda references, **_: (ready, references), raising=False)
    policy, _ = make_groups(tmp_path, log)
    policy.begin_save("folder", 3)
    planning = [f"p{i}.begin_save" for i in range(4)]
    assert not any(waited), "the loop waits for nothing"
    assert not policy.save_is_written()
    assert [call[0] for call in log] == planning
    ready += planning
    assert policy.save_is_written()
    assert planning in waited
    policy.begin_save("folder", 4)
    policy.train(4, BATCH)
    assert waited.index([f"p{i}.train" for i in range(4)]) > len(waited) - 1 - waited[::-1].index(planning)


def test_what_fails_in_planning_is_raised_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(calls: list[Any], _: Any) -> list[bool]:
        if any("begin_save" in call.reference for call in calls):
            raise OSError("no space left on device")
        return [True for _ in calls]

    log: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "collect", collect)
    policy, _ = make_groups(tmp_path, log)
    policy.begin_save("folder", 3)
    with pytest.raises(OSError, match="no space"):
        policy.train(4, BATCH)
    assert not any("train" in call[0] for call in log)
    for another in (policy.finish_save, lambda: policy.begin_save("folder", 4), lambda: policy.save("folder", 4)):
        with pytest.raises(OSError, match="no space"):  # workers may wait for each other in the one that failed
            another()
    assert [call[0] for call in log] == [f"p{i}.begin_save" for i in range(4)]


def test_with_colocation_a_failed_plan_is_raised_before_engines_get_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0, which talks to the engines, would wait for the one that failed, and the run for it."""
    log: list[tuple[Any, ...]] = []
    policy, _ = make_groups(tmp_path, log)

    def fail(calls: list[Any], _: Any) -> None:
        raise OSError(f"{calls[0].reference} failed")

    monkeypatch.setattr(module, "collect", fail)
    policy.begin_save("folder", 3)
    with pytest.raises(OSError, match=r"p0\.begin_save failed"):
        policy.change_engine_memory("resume_weights", ["url"], {})
    assert log[-1][0] == "p3.begin_save"


def test_a_plan_that_a_signal_broke_the_waiting_for_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[Any, ...]] = []
    waited: list[list[str]] = []
    policy, _ = make_groups(tmp_path, log)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "collect", interrupted)
    policy.begin_save("folder", 3)
    with pytest.raises(KeyboardInterrupt):
        policy.train(3, BATCH)
    monkeypatch.setattr(module, "collect", lambda calls, _: waited.append([c.reference for c in calls]))
    policy.finish_save()
    assert waited == [[f"p{i}.begin_save" for i in range(4)], [f"p{i}.finish_save" for i in range(4)]]


def test_no_place_for_a_new_worker_is_a_loss_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run tries again within its budget; nothing waits without end."""
    killed: list[Any] = []
    log: list[Any] = []
    group, _ = make_groups(tmp_path, log, "--start-timeout-s", "7")
    group.num_workers, group.seats = 4, SimpleNamespace(present_gpus=lambda: [None] * 4)  # type: ignore[assignment]
    group._make = lambda gpus: [Actor(f"new{i}", log) for i in range(len(gpus))]  # type: ignore[method-assign]
    waited: list[float] = []

    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        waited.append(timeout)
        return references[:-1], references[-1:]

    monkeypatch.setattr(module, "ray", SimpleNamespace(kill=killed.append, wait=wait))
    expected = r"^train workers: Ray had no place for it within 7 s; has a node been lost\?$"
    with pytest.raises(TrainWorkerLost, match=expected):
        group.restart()
    assert (len(killed), waited) == (4, [7.0])


def test_a_process_of_a_lost_node_is_not_looked_for_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(module, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(module, "end_process", ended.append)
    for node, pid in (("lost", 11), ("here", 12)):
        module._end_process(node, pid)
    assert ended == [12]
