"""Environment variables of the programs this room starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import slime_rl

PACKAGE_ROOT = Path(slime_rl.__file__).parent.parent

ENGINE = {
    "HF_HUB_OFFLINE": "1",  # a checkpoint is a folder; nothing is looked up elsewhere
    "TOKENIZERS_PARALLELISM": "false",
    # By default the server closes idle connections after 5 s. The router keeps them, and a request on one that is just
    # being closed fails; ten of those opened the router's circuit breaker and the engine had no traffic for a minute.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
    # /health answers at once instead of generating a token, which takes over a second and would fail while paused;
    # /health_generate still does that.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
ENGINE_ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A thread waits some tenths of a millisecond for the next call of a layer: waking it takes as long as many calls.
    # Not longer, since threads that spin take the cores from those they wait for.
    "GOMP_SPINCOUNT": "20000",
    "TORCHDYNAMO_DISABLE": "1",  # compiling would cost seconds at the first requests and gain nothing here
    "CUDA_VISIBLE_DEVICES": "",
}


def program_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Our own environment, in which `slime_rl` can be imported."""
    paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **(extra or {})}


def engine_environment(
    device: Literal["cpu", "cuda"], gpus: Sequence[int] = (), threads: int = 1, shards: Sequence[int] = ()
) -> dict[str, str]:
    """For one SGLang server on the GPUs given. `shards`: the tensor-parallel ranks that it runs of a model that is cut,
    none where it is whole."""
    if device == "cuda":
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        return program_environment(ENGINE | visible)
    variables = ENGINE | ENGINE_ON_CPU | {"OMP_NUM_THREADS": str(threads)}
    if shards:  # SGLang wants to be told which core each shard is bound to
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[n % len(cores)]) for n in shards)
    return program_environment(variables)
