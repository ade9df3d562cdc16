"""Which device of which node every process gets, as plain data: pure, so that any cluster can be checked anywhere.

    bundles of a placement group ──► slots, one a device, ordered by node and index ──► train ranks, engines

Ray numbers bundles in any order over the nodes, so order comes from what was really given: consecutive ranks share a
node as long as they can (their tensor-parallel group should not cross one). The devices of an engine's part are of one
bundle, and so of one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Slot:
    """One device, or on CPU the place of one process."""

    node: str
    gpu: int | None  # index on its node, which CUDA_VISIBLE_DEVICES takes; None on CPU
    bundle: int


@dataclass(frozen=True)
class EnginePart:
    """Where one node's part of an engine runs: an actor in `bundle`, its server on `gpus` of that node."""

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


def plan_colocated(num_workers: int, num_workers_per_node: int | None, gpus_per_part: int) -> BundlePlan:
    """Bundles that train workers and engines share: no smaller than an engine's part, whose devices are of one node.

    Raises:
        ValueError: such bundles cannot hold the train workers.
    """
    plan = plan_training(num_workers, num_workers_per_node)
    if plan.processes >= gpus_per_part:
        return plan
    if num_workers % gpus_per_part:
        raise ValueError(
            f"--train-num-workers must be a multiple of the GPUs that an engine has on a node ({gpus_per_part}; "
            "--rollout-num-gpus-per-engine, --rollout-num-gpus-per-node) with --colocate, unless "
            f"--num-workers-per-node is at least that, got {num_workers}"
        )
    return BundlePlan(num_workers // gpus_per_part, gpus_per_part, spread=False)


def order_slots(slots: Sequence[Slot]) -> list[Slot]:
    """By node, then device. Nodes with more slots come first, so that whole ones are filled before remainders."""
    size = {node: sum(slot.node == node for slot in slots) for node in {slot.node for slot in slots}}
    return sorted(slots, key=lambda slot: (-size[slot.node], slot.node, -1 if slot.gpu is None else slot.gpu, slot))


def engine_places(
    slots: Sequence[Slot], num_engines: int, gpus_per_part: int, parts_per_engine: int = 1
) -> list[tuple[EnginePart, ...]]:
    """The parts of each engine, each on slots of one bundle: Ray may move bundles one by one when a node is lost.

    Raises:
        ValueError: not that many fit.
    """
    by_bundle: dict[int, list[Slot]] = {}
    for slot in order_slots(slots):
        by_bundle.setdefault(slot.bundle, []).append(slot)
    parts = []
    for bundle, own in by_bundle.items():
        for start in range(0, len(own) - gpus_per_part + 1, gpus_per_part):
            part = own[start : start + gpus_per_part]
            gpus = tuple(slot.gpu for slot in part if slot.gpu is not None)
            parts.append(EnginePart(bundle, part[0].node, gpus))
    if len(parts) < num_engines * parts_per_engine:
        counts = Counter(slot.node for slot in order_slots(slots))
        shares = ", ".join(f"{count} on {node}" for node, count in counts.items())
        each = f"{gpus_per_part * parts_per_engine} GPUs (--rollout-num-gpus-per-engine)"
        nodes = "each on one node" if parts_per_engine == 1 else f"each on {parts_per_engine} nodes"
        raise ValueError(f"{num_engines} engines of {each}, {nodes}, do not fit: there are {shares}")
    starts = range(0, num_engines * parts_per_engine, parts_per_engine)
    return [tuple(parts[start : start + parts_per_engine]) for start in starts]
