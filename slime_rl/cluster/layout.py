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
class EngineShape:
    """How large an engine is: so many parts, each on one node. Several parts may be on the same one."""

    gpus_per_part: int
    num_parts: int = 1

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_part * self.num_parts


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


def engine_places(slots: Sequence[Slot], shapes: Sequence[EngineShape]) -> list[tuple[EnginePart, ...]]:
    """The parts of each engine, each on slots of one bundle: Ray may move bundles one by one when a node is lost.
    Engines with larger parts choose first, since small ones fit into what is left.

    Raises:
        ValueError: not all of them fit.
    """
    free: dict[int, list[Slot]] = {}
    for slot in order_slots(slots):
        free.setdefault(slot.bundle, []).append(slot)
    places: dict[int, tuple[EnginePart, ...]] = {}
    for index in sorted(range(len(shapes)), key=lambda index: -shapes[index].gpus_per_part):
        parts = [_take_part(free, shapes[index].gpus_per_part) for _ in range(shapes[index].num_parts)]
        places[index] = tuple(part for part in parts if part is not None)
        if len(places[index]) < len(parts):
            raise ValueError(_do_not_fit(slots, shapes))
    return [places[index] for index in range(len(shapes))]


def _take_part(free: dict[int, list[Slot]], num_gpus: int) -> EnginePart | None:
    """The first slots of a bundle that has as many left."""
    for bundle, left in free.items():
        if len(left) >= num_gpus:
            part, free[bundle] = left[:num_gpus], left[num_gpus:]
            return EnginePart(bundle, part[0].node, tuple(slot.gpu for slot in part if slot.gpu is not None))
    return None


def largest_first(shapes: Sequence[EngineShape]) -> list[EngineShape]:
    """Each shape once, in the order in which placement groups are reserved: large ones while nodes are whole."""
    return sorted(set(shapes), key=lambda shape: (-shape.gpus_per_part, -shape.num_parts))


def _do_not_fit(slots: Sequence[Slot], shapes: Sequence[EngineShape]) -> str:
    counts = Counter(slot.node for slot in order_slots(slots))
    shares = ", ".join(f"{count} on {node}" for node, count in counts.items())
    wanted = []
    for shape, count in Counter(shapes).items():
        of = f"{shape.num_gpus} GPUs" if shape.num_gpus > 1 else "one GPU"
        parts = "" if shape.num_parts == 1 else f" in {shape.num_parts} parts"
        wanted.append(f"{count} x an engine of {of}{parts}")
    return (
        f"{' and '.join(wanted)} (--rollout-num-gpus-per-engine, --rollout-num-gpus-per-node, --sglang-config), each "
        f"engine or part on one node, do not fit: there are {shares}"
    )
