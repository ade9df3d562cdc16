"""Which bundle of which placement group each process gets: one group for training, one for engines.

Ray gives every actor its own CUDA_VISIBLE_DEVICES, which the SGLang server below it inherits.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_rl.config import Config


class Placement:
    """Reserves the bundles of a run.

    Raises:
        ValueError: the cluster does not have the CPUs or GPUs that the flags ask for; names what there is.
    """

    def __init__(self, config: Config) -> None:
        uses_gpus = config.cluster.device == "cuda"
        timeout_s = config.cluster.start_timeout_s
        self.gpus_per_worker = 1 if uses_gpus else 0
        self.gpus_per_engine = config.cluster.rollout_num_gpus_per_engine if uses_gpus else 0
        self.train = _reserve(_bundle(self.gpus_per_worker), config.cluster.train_num_workers, timeout_s)
        self.rollout: PlacementGroup | None = None
        if config.needs_engines:
            self.rollout = _reserve(_bundle(self.gpus_per_engine), config.cluster.rollout_num_engines, timeout_s)

    def train_options(self, rank: int) -> dict[str, Any]:
        """Ray options of train worker `rank`."""
        return _options(self.train, rank, self.gpus_per_worker)

    def engine_options(self, index: int) -> dict[str, Any]:
        """Ray options of engine `index`."""
        assert self.rollout is not None, "no engines were placed"
        return _options(self.rollout, index, self.gpus_per_engine)


def _bundle(gpus: int) -> dict[str, float]:
    return {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})


def _options(group: PlacementGroup, index: int, gpus: int) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def _reserve(bundle: dict[str, float], count: int, timeout_s: float) -> PlacementGroup:
    total = ray.cluster_resources()
    for kind, each in bundle.items():
        if count * each > total.get(kind, 0.0):
            raise ValueError(
                f"this run needs {count * each:g} {kind}s in one placement group but the Ray cluster has "
                f"{total.get(kind, 0.0):g}; lower --train-num-workers or --rollout-num-engines, or give --ray-address "
                "of a larger cluster"
            )
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(timeout_s):
        raise ValueError(
            f"the Ray cluster did not give {count} bundles of {bundle} within --start-timeout-s {timeout_s:g}; "
            f"free now: {ray.available_resources()}"
        )
    return group
