"""Several coroutines at once, of which none outlives a failure of another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order. The first error ends the others, and is raised; `asyncio.gather` would let them go
    on, and keep engines, services and workers busy for nobody."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first one ended the others; it is the one to tell
    return [task.result() for task in tasks]
