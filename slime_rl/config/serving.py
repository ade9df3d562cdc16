from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_rl.config.checks import check_positive
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine: SGLang.

    Any argument of the installed SGLang can be given as --sglang-NAME.
    """

    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the engine's weights; auto takes --train-dtype."""

    engine_mem_fraction: float | None = None
    """Share of the device's memory for weights and KV cache (SGLang's mem_fraction_static)."""

    engine_max_total_tokens: int | None = None
    """Tokens that the KV cache holds; on CPU 32768 when not given."""

    engine_health_timeout_s: float = 30.0
    """An engine that does not answer its health check for this long counts as dead."""

    sglang_args: tuple[str, ...] = flag((), passthrough="sglang")
    """Every --sglang-NAME [VALUE] is passed to the SGLang server as --NAME [VALUE]."""

    def __post_init__(self) -> None:
        check_positive(
            engine_mem_fraction=self.engine_mem_fraction,
            engine_max_total_tokens=self.engine_max_total_tokens,
            engine_health_timeout_s=self.engine_health_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Router: sglang-router in front of the engines.

    Any of its arguments can be given as --router-NAME.
    """

    router_policy: Literal["round_robin", "random", "cache_aware", "power_of_two", "manual"] = "cache_aware"
    """How requests are spread over the engines; manual keeps every multi-turn episode on the engine that began it."""

    router_args: tuple[str, ...] = flag((), passthrough="router")
    """Every --router-NAME [VALUE] is passed to sglang-router as --NAME [VALUE]."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Weight sync: how new weights get from the trainer to the engines."""

    weight_sync: Literal["tensor", "distributed"] = "tensor"
    """tensor passes shared memory on one machine; distributed broadcasts over gloo or NCCL."""

    weight_sync_bucket_bytes: int = 512 * 1024 * 1024
    """Most bytes of weights on the way at once."""

    def __post_init__(self) -> None:
        check_positive(weight_sync_bucket_bytes=self.weight_sync_bucket_bytes)
