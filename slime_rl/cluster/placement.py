"""Which bundle of which placement group each process gets.

Apart (default): one group for training, one for engines. With `--colocate` both use the same bundles, one GPU each,
and take turns. Ray gives every actor its own CUDA_VISIBLE_DEVICES, which the SGLang server below it inherits.
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

    def __init__(self, config: Config, uses_gpus: bool) -> None:
        workers = config.cluster.train_num_workers
        engines = config.cluster.rollout_num_engines if config.needs_engines else 0
        per_engine = config.cluster.rollout_num_gpus_per_engine
        self.colocate = config.cluster.colocate
        self.gpus_per_engine = per_engine if uses_gpus else 0
        self.gpus_per_worker = 1 if uses_gpus else 0
        if self.colocate and uses_gpus and per_engine > 1:
            raise ValueError("--colocate needs --rollout-num-gpus-per-engine 1 for now; leave --colocate out otherwise")
        if self.colocate:
            bundles = [_bundle(2, self.gpus_per_worker)] * max(workers, engines)
            self.train = self.rollout = _reserve(bundles, config.cluster.start_timeout_s)
        else:
            self.train = _reserve([_bundle(1, self.gpus_per_worker)] * workers, config.cluster.start_timeout_s)
            self.rollout = (
                _reserve([_bundle(1, self.gpus_per_engine)] * engines, config.cluster.start_timeout_s)
                if engines
                else None
            )

    def train_options(self, rank: int) -> dict[str, Any]:
        """Ray options of train worker `rank`."""
        gpus = 0.5 * self.gpus_per_worker if self.colocate else self.gpus_per_worker
        return _options(self.train, rank, gpus)

    def engine_options(self, index: int) -> dict[str, Any]:
        """Ray options of engine `index`."""
        assert self.rollout is not None, "no engines were placed"
        gpus = 0.5 * self.gpus_per_engine if self.colocate else self.gpus_per_engine
        return _options(self.rollout, index, gpus)


def _bundle(cpus: int, gpus: int) -> dict[str, float]:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def _options(group: PlacementGroup, index: int, gpus: float) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def _reserve(bundles: list[dict[str, float]], timeout_s: float) -> PlacementGroup:
    total = ray.cluster_resources()
    for kind, flag in (("CPU", "CPUs"), ("GPU", "GPUs")):
        wanted = sum(bundle.get(kind, 0.0) for bundle in bundles)
        if wanted > total.get(kind, 0.0):
            raise ValueError(
                f"this run needs {wanted:g} {flag} in one placement group but the Ray cluster has "
                f"{total.get(kind, 0.0):g}; "
                "lower --train-num-workers or --rollout-num-engines, or give --ray-address of a larger cluster"
            )
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        raise ValueError(
            f"the Ray cluster did not give {len(bundles)} bundles of {bundles[0]} within --start-timeout-s "
            f"{timeout_s:g}; "
            f"free now: {ray.available_resources()}"
        )
    return group
