"""Plugins for runs: those that go wrong, and a reward that an untrained model gets too."""

from __future__ import annotations

from typing import Any

from slime_rl.types import Sample


async def raises(config: Any, group: list[Sample]) -> list[float]:
    raise KeyError("no such answer")


async def wrong_signature(config: Any) -> list[float]:
    return []


async def every_second(config: Any, group: list[Sample]) -> list[float]:
    return [float(sample.index % 2) for sample in group]


async def wrong_count(config: Any, group: list[Sample]) -> list[float]:
    return [1.0]
