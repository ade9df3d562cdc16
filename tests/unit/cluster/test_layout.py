"""Layouts of 1, 2, 8 and 64 nodes, with bundles in whatever order Ray gives them."""

from __future__ import annotations

import random

import pytest

from slime_rl.cluster.layout import (
    EngineShape,
    Slot,
    engine_places,
    largest_first,
    order_slots,
    plan_colocated,
    plan_training,
)


def shuffled_slots(num_nodes: int, gpus_per_node: int, bundle_size: int, seed: int = 0) -> list[Slot]:
    """Every GPU of a cluster as a slot; bundles of `bundle_size` lie on the nodes in no order, as their GPUs do."""
    source = random.Random(seed)
    places = []
    for node in range(num_nodes):
        gpus = list(range(gpus_per_node))
        source.shuffle(gpus)
        places += [(node, gpus[i : i + bundle_size]) for i in range(0, gpus_per_node, bundle_size)]
    source.shuffle(places)
    return [Slot(f"node{node:02d}", gpu, bundle) for bundle, (node, gpus) in enumerate(places) for gpu in gpus]


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("bundle_size", [1, 2, 8])
def test_ranks_follow_nodes_and_gpu_indices(num_nodes: int, bundle_size: int) -> None:
    slots = order_slots(shuffled_slots(num_nodes, 8, bundle_size))
    for rank, slot in enumerate(slots):
        assert slot.node == f"node{rank // 8:02d}"
        assert slot.gpu == rank % 8


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_engines_have_gpus_of_one_node_and_share_none(num_nodes: int, tensor_parallel: int) -> None:
    slots = shuffled_slots(num_nodes, 8, bundle_size=8 if num_nodes == 2 else tensor_parallel, seed=num_nodes)
    num_engines = num_nodes * 8 // tensor_parallel
    places = engine_places(slots, [EngineShape(tensor_parallel)] * num_engines)
    places = [part for (part,) in places]
    taken = [(place.node, gpu) for place in places for gpu in place.gpus]
    assert len(places) == num_engines
    assert len(set(taken)) == len(taken) == num_nodes * 8
    of_bundle = {(slot.bundle, slot.node, slot.gpu) for slot in slots}
    for place in places:
        assert len(place.gpus) == tensor_parallel and list(place.gpus) == sorted(place.gpus)
        devices = {(place.bundle, place.node, gpu) for gpu in place.gpus}
        assert devices <= of_bundle, "Ray may move this bundle to another node without the others"


def test_whole_nodes_come_before_remainders() -> None:
    slots = [Slot("a", 3, 0), *(Slot("b", gpu, 1 + gpu) for gpu in (2, 0, 1, 3))]
    assert [(slot.node, slot.gpu) for slot in order_slots(slots)] == [("b", 0), ("b", 1), ("b", 2), ("b", 3), ("a", 3)]


def test_an_engine_that_would_cross_nodes_is_refused() -> None:
    slots = [Slot(node, gpu, "ab".index(node)) for node in "ab" for gpu in range(3)]
    assert [part.node for (part,) in engine_places(slots, [EngineShape(2)] * 2)] == ["a", "b"]
    with pytest.raises(
        ValueError, match=r"3 x an engine of 2 GPUs .* on one node, do not fit: there are 3 on a, 3 on b"
    ):
        engine_places(slots, [EngineShape(2)] * 3)


@pytest.mark.parametrize(("num_nodes", "engine_nodes"), [(2, 2), (8, 2), (8, 4), (64, 16)])
def test_an_engine_larger_than_a_node_has_whole_nodes(num_nodes: int, engine_nodes: int) -> None:
    slots = shuffled_slots(num_nodes, 8, bundle_size=8, seed=num_nodes)
    engines = engine_places(slots, [EngineShape(8, engine_nodes)] * (num_nodes // engine_nodes))
    by_bundle = {slot.bundle: slot.node for slot in slots}
    for parts in engines:
        assert len({part.node for part in parts}) == engine_nodes
        assert all(part.gpus == tuple(range(8)) and by_bundle[part.bundle] == part.node for part in parts)
    assert len({part.node for parts in engines for part in parts}) == num_nodes
    with pytest.raises(
        ValueError, match=rf"an engine of {8 * engine_nodes} GPUs in {engine_nodes} parts .* on one node, do not"
    ):
        engine_places(slots, [EngineShape(8, engine_nodes)] * (num_nodes // engine_nodes + 1))


def test_large_engines_choose_before_small_ones_that_come_first() -> None:
    slots = [Slot(node, gpu, "ab".index(node)) for node in "ab" for gpu in range(4)]
    shapes = [EngineShape(size) for size in (1, 3, 1, 3)]
    found = [(part.node, part.gpus) for (part,) in engine_places(slots, shapes)]
    assert found == [("a", (3,)), ("a", (0, 1, 2)), ("b", (3,)), ("b", (0, 1, 2))]
    with pytest.raises(
        ValueError,
        match=r"2 x an engine of one GPU and 1 x an engine of 8 GPUs in 2 parts .*, do not fit: "
        "there are 4 on a, 4 on b",
    ):
        engine_places(slots, [EngineShape(1), EngineShape(4, 2), EngineShape(1)])


def test_large_parts_are_reserved_before_small_ones() -> None:
    shapes = [EngineShape(1), EngineShape(4), EngineShape(4, 2), EngineShape(1), EngineShape(2, 4)]
    assert largest_first(shapes) == [EngineShape(4, 2), EngineShape(4), EngineShape(2, 4), EngineShape(1)]


def test_on_cpu_there_are_places_without_gpus() -> None:
    slots = [Slot("a", None, bundle) for bundle in range(3)]
    assert [(part.bundle, part.gpus) for (part,) in engine_places(slots, [EngineShape(1)] * 2)] == [(0, ()), (1, ())]


def test_bundles_are_nodes_when_the_nodes_are_given() -> None:
    assert (plan_training(16, None).count, plan_training(16, None).processes) == (16, 1)
    plan = plan_training(16, 8)
    assert (plan.count, plan.processes, plan.spread) == (2, 8, True)


def test_shared_bundles_hold_a_whole_engine() -> None:
    assert (plan_colocated(16, None, 1).count, plan_colocated(16, None, 1).processes) == (16, 1)
    assert (plan_colocated(16, None, 4).count, plan_colocated(16, None, 4).processes) == (4, 4)
    assert (plan_colocated(16, 8, 4).count, plan_colocated(16, 8, 4).processes) == (2, 8)
    assert (plan_colocated(6, 6, 4).count, plan_colocated(6, 6, 4).processes) == (1, 6)
    with pytest.raises(ValueError, match=r"--train-num-workers must be a multiple of .* \(4; .*got 6"):
        plan_colocated(6, None, 4)
