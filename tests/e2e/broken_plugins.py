"""Plugins that go wrong, for the runs that must say so."""

from __future__ import annotations

from typing import Any

from slime_rl.types import Sample


async def raises(config: Any, group: list[Sample]) -> list[float]:
    raise KeyError("no such answer")


async def wrong_signature(config: Any) -> list[float]:
    return []


async def wrong_count(config: Any, group: list[Sample]) -> list[float]:
    return [1.0]
