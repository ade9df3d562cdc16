"""Tools for the agent tests."""

from __future__ import annotations

import asyncio
import os
import time


def slow(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "done"


def leave() -> None:
    """Ends its process."""
    os._exit(1)


def long_text(count: int = 5) -> str:
    """Many words."""
    return " ".join(f"word{i}" for i in range(count))


async def gathered(name: str) -> dict[str, str]:
    """Says hello, once another call is there too."""
    await asyncio.sleep(0.05)
    return {"hello": name}


def odd(value: complex) -> str:
    """Has no JSON type."""
    return str(value)
