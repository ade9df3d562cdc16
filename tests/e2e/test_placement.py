"""Real Ray clusters of several nodes with GPUs that are only numbers: where train workers and engines go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from factories import make_config
from ray.cluster_utils import Cluster
from ray_cluster import ray_cluster

from slime_rl.cluster.placement import Placement, Seats

NODES, GPUS = 2, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with four GPUs each."""
    with ray_cluster(*[{"num_cpus": 8, "num_gpus": GPUS}] * NODES) as made:
        yield made


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """Makes a Placement from flags; its bundles are given back afterwards."""
    made: list[Placement] = []

    def make(*flags: str) -> Placement:
        batch = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--start-timeout-s", "300")
        made.append(Placement(make_config(tmp_path, "--device", "cuda", *batch, *flags)))
        return made[-1]

    yield make
    for placement in made:
        seats = [placement.train, *([] if placement.critic is None else [placement.critic])]
        groups = [*(seat.group for seat in seats), *placement.rollout]  # those of engines are there once for each
        for group in {group.id: group for group in groups}.values():
            ray.util.remove_placement_group(group)


def node_of(options: dict[str, Any]) -> str:
    """Where an actor with these options really runs."""
    return ray.get(ray.remote(lambda: ray.get_runtime_context().get_node_id()).options(**options).remote())


def devices(seats: Seats, num_workers: int) -> list[tuple[str, int | None]]:
    """(node, GPU) of the workers of a group; each has one to itself, where its actor runs."""
    found = [(seats.slots[rank].node, seats.gpu(rank)) for rank in range(num_workers)]
    assert [node_of(seats.options(rank)) for rank in range(num_workers)] == [node for node, _ in found]
    assert len(set(found)) == num_workers
    return found


def check(placement: Placement, num_workers: int, num_engines: int) -> None:
    """Every process runs on the node of its GPUs, and no two of one side share a GPU."""
    workers = devices(placement.train, num_workers)
    engines = []
    for index in range(num_engines):
        for part, (options, gpus) in zip(placement.places[index], placement.engine_seats(index), strict=True):
            assert node_of(options) == part.node
            engines += [(part.node, gpu) for gpu in gpus]
    assert len(set(engines)) == len(engines)
    shared = set(workers) & set(engines)
    assert shared == (set(engines) if placement.config.cluster.colocate else set())


def test_workers_of_two_nodes_and_engines_beside_them(place: Any) -> None:
    flags = ("--num-nodes", "2", "--num-workers-per-node", "2", "--rollout-num-gpus", "4")
    placement = place(*flags, "--rollout-num-gpus-per-engine", "2")
    check(placement, num_workers=4, num_engines=2)
    nodes = [slot.node for slot in placement.train.slots]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_colocated_engines_have_the_gpus_of_the_workers(place: Any) -> None:
    placement = place(
        "--colocate", "--train-num-workers", "8", "--rollout-num-engines", "4", "--rollout-num-gpus-per-engine", "2"
    )
    check(placement, num_workers=8, num_engines=4)
    assert [placement.train.gpu(rank) for rank in range(8)] == [0, 1, 2, 3] * 2


def test_an_engine_larger_than_a_node_has_all_of_several(place: Any) -> None:
    flags = ("--colocate", "--train-num-workers", "8", "--weight-sync", "disk", "--rollout-num-gpus-per-engine", "8")
    placement = place(*flags, "--rollout-num-gpus-per-node", "4")
    check(placement, num_workers=8, num_engines=1)
    assert [gpus for _, gpus in placement.engine_seats(0)] == [(0, 1, 2, 3)] * 2
    assert len({part.node for part in placement.places[0]}) == 2


@pytest.mark.parametrize("colocate", [False, True])
def test_engines_of_two_sizes_in_the_order_of_their_groups(place: Any, tmp_path: Path, colocate: bool) -> None:
    groups = [{"num_gpus": 2}, {"num_gpus": 4, "num_gpus_per_engine": 4}]
    (tmp_path / "sizes.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    workers = ("--colocate", "--train-num-workers", "8") if colocate else ("--train-num-workers", "2")
    placement = place("--sglang-config", str(tmp_path / "sizes.yaml"), *workers)
    check(placement, num_workers=int(workers[-1]), num_engines=3)
    assert [sum(len(gpus) for _, gpus in placement.engine_seats(index)) for index in range(3)] == [1, 1, 4]


def test_a_critic_apart_has_gpus_of_its_own_also_where_engines_take_turns_with_the_policy(place: Any) -> None:
    flags = ("--colocate", "--train-num-workers", "4", "--rollout-num-engines", "2", "--advantage-estimator", "gae")
    placement = place(*flags, "--critic-num-workers", "4")
    check(placement, num_workers=4, num_engines=2)
    assert not set(devices(placement.train, 4)) & set(devices(placement.critic, 4))


def test_what_does_not_fit_is_refused_with_what_there_is(place: Any) -> None:
    with pytest.raises(ValueError, match="needs 9 GPUs in one placement group but the Ray cluster has 8"):
        place("--train-num-workers", "9")
    with pytest.raises(ValueError, match=r"4 nodes with .* each are needed .* the Ray cluster has 2 such nodes"):
        place("--num-nodes", "4", "--num-workers-per-node", "2")
    with pytest.raises(
        ValueError, match=r"1 times .* each on one node \(--rollout-num-gpus-per-engine, .* have room for 0"
    ):
        place("--rollout-num-gpus-per-engine", "6")
