"""Metrics of the user's own, from finished samples: `--log-function-path`."""

from __future__ import annotations

from slime_rl.config import Config
from slime_rl.protocols import LogFunction
from slime_rl.registry import ExtensionPoint, own_code
from slime_rl.types import Sample

LOG_FUNCTIONS = ExtensionPoint(flag="--log-function-path", protocol=LogFunction, builtins={})


def extra_metrics(function: LogFunction, config: Config, step: int, samples: list[Sample]) -> dict[str, float]:
    """What the user's function reports for a step's samples.

    Raises:
        ValueError: it returned something else than a dictionary of numbers; names the flag and the value.
    """
    flag = f"--log-function-path {config.logging.log_function_path}"
    with own_code(flag, f", for step {step}"):
        metrics = function(config, step, samples)
    if not isinstance(metrics, dict):
        raise ValueError(f"{flag} must return a dictionary of names and numbers, got {metrics!r}")
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, (int, float)):
            raise ValueError(f"{flag} must return a dictionary of names and numbers, got {name!r}: {value!r}")
    return {name: float(value) for name, value in metrics.items()}
