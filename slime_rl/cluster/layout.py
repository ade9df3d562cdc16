"""Which device of which node every process gets, as plain data: pure, so that any cluster can be checked anywhere.

    bundles of a placement group ──► slots, one a device, ordered by node and index ──► train ranks, engines

Ray numbers bundles in any order over the nodes, so order comes from what was really given: consecutive ranks share a
node as long as they can (their tensor-parallel group should not cross one), and an engine's devices are of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Slot:
    """One device, or on CPU the place of one process."""

    node: str
    gpu: int | None  # index on its node, which CUDA_VISIBLE_DEVICES takes; None on CPU
    bundle: int


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine runs: an actor in `bundle`, its server on `gpus` of that node."""

    bundle: int
    node: str
    gpus: tuple[int, ...]  # none on CPU


@dataclass(frozen=True)
class BundlePlan:
    """What is reserved: `count` bundles of `processes` devices each; `spread`: each on a node of its own."""

    count: int
    processes: int
    spread: bool


def plan_training(num_workers: int, num_workers_per_node: int | None) -> BundlePlan:
    """Bundles for the train workers: a whole node's share each when that is given, else one a worker."""
    if num_workers_per_node is None:
        return BundlePlan(num_workers, 1, spread=False)
    return BundlePlan(num_workers // num_workers_per_node, num_workers_per_node, spread=True)


def plan_colocated(num_workers: int, num_workers_per_node: int | None, gpus_per_engine: int) -> BundlePlan:
    """Bundles that train workers and engines share: no smaller than an engine, which needs its devices on one node.

    Raises:
        ValueError: such bundles cannot hold the train workers.
    """
    plan = plan_training(num_workers, num_workers_per_node)
    if plan.processes >= gpus_per_engine:
        return plan
    if num_workers % gpus_per_engine:
        raise ValueError(
            f"--train-num-workers must be a multiple of --rollout-num-gpus-per-engine ({gpus_per_engine}) with "
            f"--colocate, unless --num-workers-per-node is at least that, got {num_workers}"
        )
    return BundlePlan(num_workers // gpus_per_engine, gpus_per_engine, spread=False)


def order_slots(slots: Sequence[Slot]) -> list[Slot]:
    """By node, then device. Nodes with more slots come first, so that whole ones are filled before remainders."""
    size = {node: sum(slot.node == node for slot in slots) for node in {slot.node for slot in slots}}
    return sorted(slots, key=lambda slot: (-size[slot.node], slot.node, -1 if slot.gpu is None else slot.gpu, slot))


def engine_places(slots: Sequence[Slot], num_engines: int, gpus_per_engine: int) -> list[EnginePlace]:
    """Engines on consecutive slots of one node each.

    Raises:
        ValueError: not that many fit.
    """
    by_node: dict[str, list[Slot]] = {}
    for slot in order_slots(slots):
        by_node.setdefault(slot.node, []).append(slot)
    places = []
    for node, own in by_node.items():
        for start in range(0, len(own) - gpus_per_engine + 1, gpus_per_engine):
            part = own[start : start + gpus_per_engine]
            gpus = tuple(slot.gpu for slot in part if slot.gpu is not None)
            places.append(EnginePlace(part[0].bundle, node, gpus))
    if len(places) < num_engines:
        shares = ", ".join(f"{len(own)} on {node}" for node, own in by_node.items())
        raise ValueError(
            f"{num_engines} engines of {gpus_per_engine} GPUs (--rollout-num-gpus-per-engine), each on one node, do "
            f"not fit: there are {shares}"
        )
    return places[:num_engines]
