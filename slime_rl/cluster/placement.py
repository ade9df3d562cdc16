"""Reserves what a run needs of the Ray cluster, finds out which devices that are, and places train workers and engines.

    reserve (placement groups) ──► ask every bundle for its node and GPU indices ──► layout.py

Trainer and engines have a group each, or share one with --colocate; a critic apart has its own. The bundles hold the
GPUs; every process is told its own by index and asks Ray for none, since Ray's choice inside a bundle has no order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_rl.cluster.errors import no_place
from slime_rl.cluster.layout import (
    BundlePlan,
    EnginePart,
    EngineShape,
    Slot,
    engine_places,
    largest_first,
    order_slots,
    plan_colocated,
    plan_training,
)
from slime_rl.config import ClusterConfig, Config

EngineSeat = tuple[dict[str, Any], tuple[int, ...]]  # Ray options; indices of the GPUs on the node, none on CPU


@dataclass(frozen=True)
class Seats:
    """Where the workers of one train group sit, by rank."""

    placement: Placement
    group: PlacementGroup
    slots: list[Slot]

    def options(self, rank: int) -> dict[str, Any]:
        """Ray options of worker `rank`."""
        return _options(self.group, self.slots[rank].bundle)

    def gpu(self, rank: int) -> int | None:
        """Index of the GPU of worker `rank` on its node."""
        return self.slots[rank].gpu

    def present_gpus(self) -> list[int | None]:
        """The same of every rank, where its bundle is now."""
        first = [(self.options(rank), self.gpu(rank)) for rank in range(len(self.slots))]
        present = self.placement.present_gpus([(options, () if gpu is None else (gpu,)) for options, gpu in first])
        return [gpus[0] if gpus else None for gpus in present]


class Placement:
    """Where every process of a run goes.

    Raises:
        ValueError: the cluster does not have the CPUs or GPUs that the flags ask for; names what there is.
    """

    def __init__(self, config: Config) -> None:
        cluster = config.cluster
        self.config, self.uses_gpus = config, cluster.device == "cuda"
        self._gpus: dict[tuple[str, int], list[int]] = {}  # by placement group and bundle, as they were at first
        self._reserved: defaultdict[str, float] = defaultdict(float)  # CPUs and GPUs
        self.places: list[tuple[EnginePart, ...]] = []  # of the policy's engines
        self.rollout: list[PlacementGroup] = []  # which each of them is in
        has_engines = config.needs_engines and not cluster.rollout_external_engine_addrs
        shapes, workers = _policy_shapes(config) if has_engines else [], cluster.train_num_workers
        if cluster.colocate and has_engines:
            largest = max(shape.gpus_per_part for shape in shapes)
            plan = plan_colocated(workers, cluster.num_workers_per_node, largest)
            self.train = self._seats(plan, cpus_each=2)
            self.rollout = [self.train.group] * len(shapes)
            self.places = engine_places(self.train.slots, shapes)
        else:
            self.train = self._seats(plan_training(workers, cluster.num_workers_per_node), cpus_each=1)
        self.critic = None
        if config.critic_is_apart:
            self.critic = self._seats(plan_training(config.critic.critic_num_workers, None), cpus_each=1)
        if has_engines and not cluster.colocate:
            self._reserve_policy(shapes)
        self._check_reach()

    def _check_reach(self) -> None:
        """Ray's nodes may share a machine, which has one address."""
        if self.config.weight_sync.weight_sync != "tensor" or not self.places:
            return
        machines = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        trainer = machines[self.train.slots[0].node]
        others = sorted({machines[part.node] for parts in self.places for part in parts} - {trainer})
        if others:
            raise ValueError(
                f"--weight-sync tensor passes memory of one machine: the first train worker is on {trainer}, engines "
                f"are on {', '.join(others)}; give distributed, or disk (with --colocate the only one)"
            )

    def engine_seats(self, index: int) -> list[EngineSeat]:
        """Where engine `index` runs, by node."""
        return [(_options(self.rollout[index], part.bundle), part.gpus) for part in self.places[index]]

    def present_gpus(self, wanted: Sequence[EngineSeat]) -> list[tuple[int, ...]]:
        """For (Ray options, indices of the GPUs as they were at first) the indices now: when a node is lost Ray moves
        its bundles to another one, where other GPUs may be free.

        Raises:
            NoPlace: Ray has no place for a bundle; says after how long.
        """
        if not self.uses_gpus:
            return [gpus for _, gpus in wanted]
        bundles = {_key(options): options for options, _ in wanted}
        asked = {
            key: ray.remote(_node_and_gpus).options(**{**options, "num_gpus": len(self._gpus[key])}).remote()
            for key, options in bundles.items()
        }
        limit_s = self.config.cluster.start_timeout_s
        try:
            found = dict(zip(asked, ray.get(list(asked.values()), timeout=limit_s), strict=True))
        except GetTimeoutError as error:
            raise no_place(limit_s) from error
        moved = {key: dict(zip(sorted(self._gpus[key]), sorted(gpus), strict=True)) for key, (_, gpus) in found.items()}
        return [tuple(moved[_key(options)][gpu] for gpu in gpus) for options, gpus in wanted]

    def reserve_engines(self, num_engines: int, cluster: ClusterConfig) -> list[list[EngineSeat]]:
        """Where engines beside those of the policy run, by node, on GPUs of their own; `cluster` says how large."""
        group, places = self._places(num_engines, _shape(cluster))
        return [[(_options(group, part.bundle), part.gpus) for part in parts] for parts in places]

    def _reserve_policy(self, shapes: Sequence[EngineShape]) -> None:
        """A placement group for the engines of each size."""
        found: dict[int, tuple[PlacementGroup, tuple[EnginePart, ...]]] = {}
        for shape in largest_first(shapes):
            alike = [index for index, other in enumerate(shapes) if other == shape]
            group, places = self._places(len(alike), shape)
            found |= {index: (group, parts) for index, parts in zip(alike, places, strict=True)}
        self.rollout = [found[index][0] for index in range(len(shapes))]
        self.places = [found[index][1] for index in range(len(shapes))]

    def _places(self, num_engines: int, shape: EngineShape) -> tuple[PlacementGroup, list[tuple[EnginePart, ...]]]:
        plan = BundlePlan(num_engines * shape.num_parts, shape.gpus_per_part, spread=False)
        group = self._reserve(plan, cpus_each=1)
        return group, engine_places(self._slots(group, plan), [shape] * num_engines)

    def _seats(self, plan: BundlePlan, cpus_each: int) -> Seats:
        group = self._reserve(plan, cpus_each)
        return Seats(self, group, order_slots(self._slots(group, plan)))

    def _reserve(self, plan: BundlePlan, cpus_each: int) -> PlacementGroup:
        bundle = {"CPU": float(cpus_each * plan.processes)}
        if self.uses_gpus:
            bundle["GPU"] = float(plan.processes)
        self._check_fits(plan, bundle)
        group = placement_group([bundle] * plan.count, strategy="STRICT_SPREAD" if plan.spread else "PACK")
        timeout_s = self.config.cluster.start_timeout_s
        if not group.wait(timeout_s):
            raise ValueError(
                f"the Ray cluster did not give {plan.count} bundles of {bundle} within --start-timeout-s "
                f"{timeout_s:g}; free now: {ray.available_resources()}"
            )
        for kind, each in bundle.items():
            self._reserved[kind] += plan.count * each
        return group

    def _check_fits(self, plan: BundlePlan, bundle: dict[str, float]) -> None:
        """At once, since Ray would wait for the timeout. What others hold is not looked at: they may give it back."""
        total = ray.cluster_resources()
        for kind, each in bundle.items():
            own, needed = self._reserved[kind], plan.count * each
            if own + needed > total.get(kind, 0.0):
                beside = f" beside {own:g} that it has already" if own else ""
                raise ValueError(
                    f"this run needs {needed:g} {kind}s in one placement group{beside} but the Ray cluster has "
                    f"{total.get(kind, 0.0):g}; lower --train-num-workers, --critic-num-workers or "
                    "--rollout-num-engines, or give --ray-address of a larger cluster"
                )
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = [min(int(node.get(kind, 0.0) // each) for kind, each in bundle.items()) for node in nodes]
        if plan.spread and sum(map(bool, room)) < plan.count:
            raise ValueError(
                f"{plan.count} nodes with {bundle} each are needed (--num-nodes, --num-workers-per-node), the Ray "
                f"cluster has {sum(map(bool, room))} such nodes"
            )
        if sum(room) < plan.count:
            raise ValueError(
                f"{plan.count} times {bundle} is needed, each on one node (--rollout-num-gpus-per-engine, "
                f"--rollout-num-gpus-per-node), the nodes of the Ray cluster have room for {sum(room)}"
            )

    def _slots(self, group: PlacementGroup, plan: BundlePlan) -> list[Slot]:
        """What the bundles really are."""
        if not self.uses_gpus:
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            return [Slot(nodes[bundle], None, bundle) for bundle in range(plan.count) for _ in range(plan.processes)]
        asked = [
            ray.remote(_node_and_gpus).options(**_options(group, bundle, plan.processes)).remote()
            for bundle in range(plan.count)
        ]
        found = ray.get(asked, timeout=self.config.cluster.start_timeout_s)
        self._gpus |= {_key(_options(group, bundle)): gpus for bundle, (_, gpus) in enumerate(found)}
        return [Slot(node, gpu, bundle) for bundle, (node, gpus) in enumerate(found) for gpu in gpus]


def check_colocation(config: Config) -> None:
    """That the policy's engines fit on the train workers' bundles, whatever nodes those will be on.

    Raises:
        ValueError: they do not.
    """
    shapes, cluster = _policy_shapes(config), config.cluster
    largest = max(shape.gpus_per_part for shape in shapes)
    plan = plan_colocated(cluster.train_num_workers, cluster.num_workers_per_node, largest)
    engine_places(
        [Slot(f"bundle {bundle}", None, bundle) for bundle in range(plan.count) for _ in range(plan.processes)], shapes
    )


def _shape(cluster: ClusterConfig) -> EngineShape:
    return EngineShape(cluster.engine_gpus_on_node, cluster.nodes_per_engine)


def _policy_shapes(config: Config) -> list[EngineShape]:
    """Of the policy's engines, by number."""
    policy = config.served_models[0]
    return [
        _shape(config.for_engine(policy, group).cluster) for group in policy.groups for _ in range(group.num_engines)
    ]


def _node_and_gpus() -> tuple[str, list[int]]:
    """Runs in a bundle: its node, and the indices of all its GPUs."""
    return ray.get_runtime_context().get_node_id(), [int(gpu) for gpu in ray.get_gpu_ids()]


def _key(options: dict[str, Any]) -> tuple[str, int]:
    """Which bundle an actor with these options is in."""
    strategy = options["scheduling_strategy"]
    return strategy.placement_group.id.hex(), strategy.placement_group_bundle_index


def _options(group: PlacementGroup, bundle: int, gpus: int = 0) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}
