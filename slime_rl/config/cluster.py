from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_rl.config.checks import check, check_not_negative, check_positive
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Cluster: how many workers and engines, and where."""

    train_num_workers: int = 1
    """Megatron workers in all: one process each, one GPU each where there are GPUs."""

    rollout_num_engines: int = 1
    """SGLang engines behind the router."""

    rollout_num_gpus_per_engine: int = 1
    """GPUs of one engine (its tensor-parallel size)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where both run. auto takes cuda where torch finds it, else cpu."""

    ray_address: str | None = None
    """Address of a running Ray cluster, or 'auto'; a private one is started on this machine when not given."""

    train_threads_per_worker: int = 0
    """CPU threads of one Megatron worker; 0 shares the cores among the workers."""

    start_timeout_s: float = 300.0
    """Longest time that engines, router and workers may take to start."""

    def __post_init__(self) -> None:
        check_positive(
            train_num_workers=self.train_num_workers,
            rollout_num_engines=self.rollout_num_engines,
            rollout_num_gpus_per_engine=self.rollout_num_gpus_per_engine,
            start_timeout_s=self.start_timeout_s,
        )
        check_not_negative(train_threads_per_worker=self.train_threads_per_worker)


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
