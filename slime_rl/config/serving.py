from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_rl.config.checks import check, check_not_negative, check_positive, read_text
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine: SGLang.

    Any argument of the installed SGLang can be given as --sglang-NAME.
    """

    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the engine's weights; auto takes --train-dtype, and bfloat16 on a GPU where the weights are fp8."""

    engine_mem_fraction: float | None = None
    """Share of the device's memory for weights and KV cache (SGLang's mem_fraction_static)."""

    engine_max_total_tokens: int | None = None
    """Tokens that the KV cache holds; on CPU 32768 when not given."""

    engine_threads: int = 1
    """CPU threads of one engine; more are worth it for larger models, where trainers are idle meanwhile."""

    engine_health_first_wait_s: float = flag(0.0, aliases=("--rollout-health-check-first-wait",))
    """Seconds after an engine's start before its health is checked, where first requests take long (compilation)."""

    engine_health_interval_s: float = flag(5.0, aliases=("--rollout-health-check-interval",))
    """Seconds between two health checks of an engine; the router is checked as often."""

    engine_health_timeout_s: float = flag(120.0, aliases=("--rollout-health-check-timeout",))
    """An engine that runs but whose scheduler does not answer health checks for this long counts as hung, and so does
    the router. One that has ended is noticed at the next check. Must be longer than the longest prefill, which on CPU
    can be a minute."""

    engine_slow_s: float | None = None
    """An engine that takes longer than this to answer a health check gets no requests until it answers in time again,
    as long as another one serves; it is not restarted and goes on to get weights. Must be longer than the longest
    prefill and the loading of a bucket of weights. Not given: slow engines stay."""

    max_engine_restarts: int = 10
    """How often engines and router may be restarted in a run, all together; one more ends the run."""

    engine_api_key_file: str | None = None
    """File with an API key that engines and router ask every caller for; without one they answer anybody."""

    sglang_config: str | None = None
    """YAML file with groups of engines that have SGLang arguments or sizes of their own, and with models beside the
    policy (a judge, say); docs/engines.md shows one. It gives --rollout-num-engines."""

    sglang_args: tuple[str, ...] = flag((), passthrough="sglang")
    """Every --sglang-NAME [VALUE] is passed to the policy's SGLang servers as --NAME [VALUE]."""

    def __post_init__(self) -> None:
        if self.engine_api_key_file is not None:
            path = Path(self.engine_api_key_file)
            is_key = path.is_file() and len(read_text("--engine-api-key-file", path).split()) == 1
            check(is_key, "--engine-api-key-file", "must be a file with one word in it", self.engine_api_key_file)
        check_positive(
            engine_threads=self.engine_threads,
            engine_max_total_tokens=self.engine_max_total_tokens,
            engine_health_interval_s=self.engine_health_interval_s,
            engine_health_timeout_s=self.engine_health_timeout_s,
            engine_slow_s=self.engine_slow_s,
        )
        check(
            self.engine_slow_s is None or self.engine_slow_s < self.engine_health_timeout_s,
            "--engine-slow-s",
            f"must be < --engine-health-timeout-s ({self.engine_health_timeout_s:g}), after which it counts as hung",
            self.engine_slow_s,
        )
        fraction = self.engine_mem_fraction
        check(fraction is None or 0 < fraction <= 1, "--engine-mem-fraction", "must be in (0, 1]", fraction)
        check_not_negative(
            engine_health_first_wait_s=self.engine_health_first_wait_s, max_engine_restarts=self.max_engine_restarts
        )

    @property
    def api_key(self) -> str | None:
        """Read where it is needed, so that it is in no record of the run's configuration."""
        return None if self.engine_api_key_file is None else Path(self.engine_api_key_file).read_text().strip()

    @property
    def authorization(self) -> dict[str, str]:
        """HTTP headers for engines and router."""
        key = self.api_key
        return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Router: sglang-router in front of the engines.

    Any of its arguments can be given as --router-NAME.
    """

    router_policy: Literal["round_robin", "random", "cache_aware", "power_of_two", "manual"] = "cache_aware"
    """How requests are spread over the engines; manual keeps every multi-turn episode on the engine that began it,
    power_of_two works with --share-router only."""

    share_router: bool = False
    """All models of --sglang-config are behind one router, and requests name theirs; else each has its own. The router
    needs a file for that, see docs/engines.md."""

    router_args: tuple[str, ...] = flag((), passthrough="router")
    """Every --router-NAME [VALUE] is passed to sglang-router as --NAME [VALUE]."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Weight sync: how new weights get from the trainer to the engines."""

    weight_sync: Literal["tensor", "distributed", "disk", "disk-delta"] = "tensor"
    """tensor passes shared memory on one machine; distributed broadcasts over gloo or NCCL; disk writes files to
    --weight-sync-dir, disk-delta after the first time only the values that changed."""

    weight_sync_dir: str | None = None
    """Folder of disk and disk-delta; trainer and engines reach it by this path. RUN_DIR/weight_sync when not given."""

    weight_sync_bucket_bytes: int | None = None
    """Bytes of a bucket of weights, of which few are on the way at once; 512 MiB on GPU and 64 MiB on CPU when not
    given."""

    def __post_init__(self) -> None:
        check_positive(weight_sync_bucket_bytes=self.weight_sync_bucket_bytes)

    def bucket_bytes(self, device: str) -> int:
        """--weight-sync-bucket-bytes, or what suits the device."""
        return self.weight_sync_bucket_bytes or (512 if device == "cuda" else 64) * 1024 * 1024
