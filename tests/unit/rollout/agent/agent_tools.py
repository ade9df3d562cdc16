"""Tools for the agent tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any


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


async def gathered(name: str, seconds: float = 0.05) -> dict[str, str]:
    """Says hello, once another call is there too."""
    await asyncio.sleep(seconds)
    return {"hello": name}


def broken_text() -> str:
    """Text that no tokenizer takes."""
    return "a\ud800b"


async def leaving(kind: str) -> Any:
    """Ends in ways that are no Exception, or with a value that JSON cannot hold."""
    if kind == "circle":
        circle: list[Any] = []
        circle.append(circle)
        return circle
    raise {"exit": SystemExit(3), "cancel": asyncio.CancelledError(), "base": BaseException("boom")}[kind]


async def stubborn() -> str:
    """Does not listen when it is cancelled."""
    for _ in range(3):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(2.0)
    return "late"


async def blocking() -> str:
    """Holds the event loop."""
    time.sleep(1.5)
    return "late"


def odd(value: complex) -> str:
    """Has no JSON type."""
    return str(value)


def unreadable(value: Nothing) -> str:  # noqa: F821
    """Has a hint that names nothing."""
    return str(value)
