from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_rl.config.checks import check, check_not_negative, check_positive
from slime_rl.config.flags import flag
from slime_rl.config.served_models import read_served_models


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Cluster: how many workers and engines, and where."""

    train_num_workers: int = 1
    """Megatron workers in all: one process each, one GPU each where there are GPUs."""

    num_nodes: int | None = flag(None, aliases=("--actor-num-nodes",))
    """Nodes that train, each with --num-workers-per-node workers; not given: Ray packs the workers anywhere."""

    num_workers_per_node: int | None = flag(None, aliases=("--actor-num-gpus-per-node",))
    """Train workers on each of --num-nodes nodes; both give --train-num-workers."""

    colocate: bool = False
    """Trainer and engines share their GPUs and take turns: each gives its memory back while the other works."""

    rollout_num_engines: int = 1
    """SGLang engines behind the router."""

    rollout_num_gpus: int | None = None
    """GPUs of all engines together, which with --rollout-num-gpus-per-engine gives --rollout-num-engines."""

    rollout_num_gpus_per_engine: int = 1
    """GPUs of one engine (its tensor-parallel size)."""

    rollout_num_gpus_per_node: int | None = flag(None, aliases=("--num-gpus-per-node",))
    """GPUs of an engine on one node, where it has more of them than a node; not given: an engine is on one node."""

    rollout_external_engine_addrs: tuple[str, ...] = ()
    """URLs of SGLang servers that run already and are used instead of own engines; see docs/gpu.md for their flags."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where both run. auto takes cuda where torch finds it, else cpu."""

    ray_address: str | None = None
    """Address of a running Ray cluster, or 'auto'; a private one is started on this machine when not given."""

    train_threads_per_worker: int = 0
    """CPU threads of one Megatron worker; 0 shares the cores among the workers."""

    start_timeout_s: float = 300.0
    """Longest time that engines, router and workers may take to start."""

    train_health_timeout_s: float = 120.0
    """A train worker whose process stands still for this long counts as dead."""

    max_restarts: int = 3
    """How often the train workers may be restarted from the last checkpoint after one died; 0 ends the run instead."""

    def __post_init__(self) -> None:
        check_positive(
            num_nodes=self.num_nodes,
            num_workers_per_node=self.num_workers_per_node,
            rollout_num_gpus=self.rollout_num_gpus,
            train_num_workers=self.train_num_workers,
            rollout_num_engines=self.rollout_num_engines,
            rollout_num_gpus_per_engine=self.rollout_num_gpus_per_engine,
            rollout_num_gpus_per_node=self.rollout_num_gpus_per_node,
            start_timeout_s=self.start_timeout_s,
            train_health_timeout_s=self.train_health_timeout_s,
        )
        check_not_negative(train_threads_per_worker=self.train_threads_per_worker, max_restarts=self.max_restarts)
        self._check_counts()

    def _check_counts(self) -> None:
        both = (self.num_nodes is None) == (self.num_workers_per_node is None)
        check(both, "--num-nodes", "goes together with --num-workers-per-node", self.num_nodes)
        if self.num_nodes is not None and self.num_workers_per_node is not None:
            product = self.num_nodes * self.num_workers_per_node
            wanted = f"must be --num-nodes x --num-workers-per-node = {product}, or left out"
            check(self.train_num_workers == product, "--train-num-workers", wanted, self.train_num_workers)
        each = self.rollout_num_gpus_per_engine
        check_engine_size("--rollout-num-gpus-per-engine", each, self.rollout_num_gpus_per_node)
        external = self.rollout_external_engine_addrs
        for url in external:
            is_url = url.startswith(("http://", "https://"))
            check(is_url, "--rollout-external-engine-addrs", "takes URLs such as http://host:30000", url)
        if external:
            wanted = f"must be the number of --rollout-external-engine-addrs ({len(external)}), or left out"
            check(self.rollout_num_engines == len(external), "--rollout-num-engines", wanted, self.rollout_num_engines)
            check(not self.colocate, "--colocate", "cannot be used with --rollout-external-engine-addrs", True)

    @property
    def nodes_per_engine(self) -> int:
        """Nodes that one engine spans."""
        each = self.rollout_num_gpus_per_engine
        return max(1, each // (self.rollout_num_gpus_per_node or each))

    @property
    def engine_gpus_on_node(self) -> int:
        """GPUs that one engine has on each of its nodes."""
        return self.rollout_num_gpus_per_engine // self.nodes_per_engine


def check_engine_size(name: str, size: int, per_node: int | None) -> None:
    """That engines of `size` GPUs fill whole nodes of `per_node`, or fit on one."""
    fits = per_node is None or size <= per_node or size % per_node == 0
    check(fits, name, f"must be at most --rollout-num-gpus-per-node ({per_node}) or a multiple of it", size)


def derived_counts(values: Mapping[str, Any]) -> dict[str, int]:
    """Counts that other flags give, for those that were not given themselves."""
    found: dict[str, int] = {}
    if values.get("train_num_workers") is None and values.get("num_nodes") and values.get("num_workers_per_node"):
        found["train_num_workers"] = values["num_nodes"] * values["num_workers_per_node"]
    if values.get("sglang_config"):
        policy = read_served_models(values["sglang_config"], values.get("rollout_num_gpus_per_engine") or 1)[0]
        if values.get("rollout_num_gpus_per_engine") is None:
            # The smallest: groups that do not say it have 1, and must have it when the file is read again.
            found["rollout_num_gpus_per_engine"] = min(policy.sizes)
        if values.get("rollout_num_engines") is None:
            found["rollout_num_engines"] = policy.num_engines
    elif values.get("rollout_num_engines") is None:
        if values.get("rollout_external_engine_addrs"):
            found["rollout_num_engines"] = len(values["rollout_external_engine_addrs"])
        elif values.get("rollout_num_gpus"):
            each = values.get("rollout_num_gpus_per_engine") or 1
            found["rollout_num_engines"] = max(1, values["rollout_num_gpus"] // each)
    return found


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism: how one model is spread over the train workers (Megatron's names)."""

    tensor_model_parallel_size: int = flag(1, aliases=("--tp-size",))
    """Workers that share every matrix."""

    sequence_parallel: bool = False
    """Also split activations outside the matrices over the tensor-parallel workers."""

    pipeline_model_parallel_size: int = flag(1, aliases=("--pp-size",))
    """Stages that the layers are cut into."""

    context_parallel_size: int = flag(1, aliases=("--cp-size",))
    """Workers that share every sequence."""

    expert_model_parallel_size: int = flag(1, aliases=("--ep-size",))
    """Workers that the experts of a mixture-of-experts layer are spread over."""

    def __post_init__(self) -> None:
        check_positive(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
        )
        check(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "--sequence-parallel",
            "needs --tensor-model-parallel-size > 1",
            self.tensor_model_parallel_size,
        )

    @property
    def model_parallel_size(self) -> int:
        """Workers that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
