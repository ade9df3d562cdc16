"""A node with an engine is lost from a real Ray: the engine waits for a place, says so, and moves to another node."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from factories import make_config
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_cluster import SMALL, ray_cluster

from slime_rl.cluster import engine_handle
from slime_rl.cluster.engine_handle import EngineHandle
from slime_rl.cluster.placement import Placement
from slime_rl.config import Config

WAIT_S = 120.0  # for what takes seconds on a quiet machine
NOTICED_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
}


class PlainEngine:
    """Stands for an EngineActor: a server that only knows where it is."""

    def __init__(self, config: Config, index: int, run_dir: str, gpus: tuple[int, ...], node_rank: int) -> None:
        self.gpus = gpus

    def start(self) -> str:
        return f"{ray.get_runtime_context().get_node_id()} {self.gpus}"

    restart = start

    def end_message(self) -> None:
        return None

    def stop(self) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with room for the trainer, and one node with room for an engine of two GPUs."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    head = {"num_cpus": 4, "num_gpus": 1, "_system_config": NOTICED_SOON}
    try:
        with ray_cluster(head, {"num_cpus": 4, "num_gpus": 3}) as made:
            yield made
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def waits_at_most(config: Config, seconds: str, tmp_path: Path) -> Config:
    cluster = make_config(tmp_path, "--device", "cuda", "--start-timeout-s", seconds).cluster
    limit = {"start_timeout_s": cluster.start_timeout_s}
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, **limit))


def hold_gpu(node_id: str) -> Any:
    """An actor of somebody else's that has a GPU of a node."""

    class Other:
        def gpus(self) -> list[int]:
            return [int(gpu) for gpu in ray.get_gpu_ids()]

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(Other).options(num_cpus=0, num_gpus=1, scheduling_strategy=there).remote()
    return actor, ray.get(actor.gpus.remote(), timeout=WAIT_S)


def test_an_engine_of_a_lost_node_waits_for_a_place_and_moves_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "EngineActor", PlainEngine)
    config = make_config(tmp_path, "--device", "cuda", "--rollout-num-gpus-per-engine", "2", "--start-timeout-s", "120")
    placement = Placement(config)
    handle = EngineHandle(config, placement, 0, placement.engine_seats(0))
    [lost] = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    assert ray.get(handle.begin(), timeout=WAIT_S) == f"{lost.node_id} {placement.engine_seats(0)[0][1]}"
    assert handle.end_message() is None

    cluster.remove_node(lost, allow_graceful=False)
    deadline = time.monotonic() + WAIT_S
    while (message := handle.end_message()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert message == "was lost with its Ray worker"

    handle.config = placement.config = waits_at_most(config, "3", tmp_path)
    with pytest.raises(RuntimeError, match=r"^Ray had no place for it within 3 s; has a node been lost\?$"):
        handle.restart()

    handle.config = placement.config = config
    found = cluster.add_node(num_cpus=4, num_gpus=4, **SMALL)
    other, held = hold_gpu(found.node_id)  # so that its free GPUs have other indices than those of the lost node
    [seat] = placement.engine_seats(0)
    place, [gpus] = handle.restart(), placement.present_gpus([seat])
    assert place == f"{found.node_id} {gpus}" and len(gpus) == 2 and not set(gpus) & set(held)
    assert handle.end_message() is None
    del other
