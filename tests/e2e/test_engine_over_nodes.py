"""One engine whose tensor-parallel ranks are on two nodes, which here are two servers on one machine."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e_runs import LIMIT_S, base_flags, run_with_kills, server_with, train_metrics
from factories import make_config
from ray.exceptions import RayTaskError
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.cluster import engine_handle
from slime_rl.cluster.engine_handle import EngineActor, _start_together
from slime_rl.engine.server import answers

FOLLOWER = "engine_0_node_1"


def test_it_serves_gets_weights_and_is_replaced_when_a_node_fails(quickstart_data: Path, tmp_path: Path) -> None:
    flags = ["--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus-per-node", "1", "--weight-sync", "distributed"]
    flags += ["--reward-function-path", "run_plugins:every_second", "--num-steps", "5"]
    run_dir = tmp_path / "run"
    flags = [*base_flags(quickstart_data, run_dir), *flags]
    before = set(Path("/dev/shm").glob("sgl_shm_*"))
    run_with_kills(flags, {2: lambda driver: server_with("--node-rank=1", driver)})
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(5))
    assert all(line["train/grad_norm"] > 0 and line["train/logprob_diff_max_abs"] < 1e-4 for line in metrics)
    assert (run_dir / "logs" / f"{FOLLOWER}.log").exists() and (run_dir / "logs" / f"{FOLLOWER}.1.log").exists()
    assert set(Path("/dev/shm").glob("sgl_shm_*")) <= before
    assert "(node 1 of 2) " in (run_dir / "logs" / "faults.log").read_text()


class DirectPart:
    """A node's part of an engine in this process, called as a Ray actor is."""

    def __init__(self, actor: EngineActor) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: functools.partial(getattr(self.actor, method), *args))


def test_a_meeting_port_that_somebody_takes_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(asked: Any) -> Any:
        try:
            return [one() for one in asked] if isinstance(asked, list) else asked()
        except RuntimeError as error:
            raise RayTaskError("part", str(error), error) from error

    monkeypatch.setattr(engine_handle, "ray", SimpleNamespace(get=get))
    model = write_tiny_checkpoint(tmp_path / "tiny")
    flags = ("--hf-checkpoint", str(model), "--max-prompt-len", "64", "--max-response-len", "64")
    nodes = ("--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus-per-node", "1", "--weight-sync", "distributed")
    config = make_config(tmp_path, *flags, *nodes)
    actors = [EngineActor(config, 0, str(tmp_path), (), rank) for rank in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        meetings = [f"127.0.0.1:{stranger.getsockname()[1]}", actors[0].meeting()]
        monkeypatch.setattr(actors[0], "meeting", lambda: meetings.pop(0))
        try:
            url = _start_together([DirectPart(actor) for actor in actors], LIMIT_S, keep_logs=False)
            assert answers(f"{url}/health") and meetings == []
        finally:
            for actor in actors:
                actor.stop()
