"""Reserves what a run needs of the Ray cluster, finds out which devices that are, and places train workers and engines.

    reserve (placement groups) ──► ask every bundle for its node and GPU indices ──► layout.py

Trainer and engines have a group each, or share one with --colocate. The bundles hold the GPUs; every process is told
its own by index and asks Ray for none, since Ray's choice inside a bundle has no order.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_rl.cluster.layout import (
    BundlePlan,
    EnginePlace,
    Slot,
    engine_places,
    order_slots,
    plan_colocated,
    plan_training,
)
from slime_rl.config import Config


class Placement:
    """Where every process of a run goes.

    Raises:
        ValueError: the cluster does not have the CPUs or GPUs that the flags ask for; names what there is.
    """

    def __init__(self, config: Config) -> None:
        cluster = config.cluster
        self.config, self.uses_gpus = config, cluster.device == "cuda"
        self.places: list[EnginePlace] = []
        has_engines = config.needs_engines and not cluster.rollout_external_engine_addrs
        workers, per_engine = cluster.train_num_workers, cluster.rollout_num_gpus_per_engine
        if cluster.colocate and has_engines:
            plan = plan_colocated(workers, cluster.num_workers_per_node, per_engine)
            self.train = self.rollout = self._reserve(plan, cpus_each=2)
            self.slots = order_slots(self._slots(self.train, plan))
            self.places = engine_places(self.slots, cluster.rollout_num_engines, per_engine)
            return
        plan = plan_training(workers, cluster.num_workers_per_node)
        self.train = self._reserve(plan, cpus_each=1)
        self.slots = order_slots(self._slots(self.train, plan))
        if has_engines:
            plan = BundlePlan(cluster.rollout_num_engines, per_engine, spread=False)
            self.rollout = self._reserve(plan, cpus_each=1)
            slots = self._slots(self.rollout, plan)
            self.places = engine_places(slots, cluster.rollout_num_engines, per_engine)

    def train_options(self, rank: int) -> dict[str, Any]:
        """Ray options of train worker `rank`."""
        return _options(self.train, self.slots[rank].bundle)

    def train_gpu(self, rank: int) -> int | None:
        """Index of the GPU of train worker `rank` on its node."""
        return self.slots[rank].gpu

    def engine_options(self, index: int) -> dict[str, Any]:
        """Ray options of engine `index`."""
        return _options(self.rollout, self.places[index].bundle)

    def engine_gpus(self, index: int) -> tuple[int, ...]:
        """Indices of the GPUs of engine `index` on its node; none on CPU."""
        return self.places[index].gpus

    def _reserve(self, plan: BundlePlan, cpus_each: int) -> PlacementGroup:
        bundle = {"CPU": float(cpus_each * plan.processes)}
        if self.uses_gpus:
            bundle["GPU"] = float(plan.processes)
        total = ray.cluster_resources()
        for kind, each in bundle.items():
            if plan.count * each > total.get(kind, 0.0):
                raise ValueError(
                    f"this run needs {plan.count * each:g} {kind}s in one placement group but the Ray cluster has "
                    f"{total.get(kind, 0.0):g}; lower --train-num-workers or --rollout-num-engines, or give "
                    "--ray-address of a larger cluster"
                )
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(all(node.get(kind, 0.0) >= each for kind, each in bundle.items()) for node in nodes)
        if fitting < (plan.count if plan.spread else 1):
            raise ValueError(
                f"{plan.count if plan.spread else 1} nodes with {bundle} each are needed (--num-nodes, "
                f"--num-workers-per-node, --rollout-num-gpus-per-engine), the Ray cluster has {fitting} such nodes"
            )
        group = placement_group([bundle] * plan.count, strategy="STRICT_SPREAD" if plan.spread else "PACK")
        timeout_s = self.config.cluster.start_timeout_s
        if not group.wait(timeout_s):
            raise ValueError(
                f"the Ray cluster did not give {plan.count} bundles of {bundle} within --start-timeout-s "
                f"{timeout_s:g}; free now: {ray.available_resources()}"
            )
        return group

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
        return [Slot(node, gpu, bundle) for bundle, (node, gpus) in enumerate(found) for gpu in gpus]


def _node_and_gpus() -> tuple[str, list[int]]:
    """Runs in a bundle: its node, and the indices of all its GPUs."""
    return ray.get_runtime_context().get_node_id(), [int(gpu) for gpu in ray.get_gpu_ids()]


def _options(group: PlacementGroup, bundle: int, gpus: int = 0) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}
