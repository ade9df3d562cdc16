"""What a reward function may return: one value for each sample, a number or a dict with `score`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_rl.types import Sample, finite_number


def read_values(flag: str, samples: Sequence[Sample], values: Any) -> list[tuple[float, dict[str, Any]]]:
    """Number and further information for each of the samples.

    Raises:
        ValueError: not one value per sample, or a value that is no finite number; begins with `flag`.
    """
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
        raise ValueError(f"{flag} must return a list with one value for each of the {len(samples)} samples, got {got}")
    return [_read(flag, sample, value) for sample, value in zip(samples, values, strict=True)]


def _read(flag: str, sample: Sample, value: Any) -> tuple[float, dict[str, Any]]:
    info: dict[str, Any] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"{flag} returned a dict without 'score' for sample {sample.index}: {value!r:.300}")
        info, value = {k: v for k, v in value.items() if k != "score"}, value["score"]
    number = finite_number(value)
    if number is None:
        raise ValueError(f"{flag} must return finite numbers, got {value!r:.300} for sample {sample.index}")
    return number, info
