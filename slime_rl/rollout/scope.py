"""What one sample has under way, so that it can be stopped from outside without losing what it has.

interrupt ──► its requests are aborted at the engines ──► the generate function gets the tokens so far, "abort"
          └─► every later request of the same sample is answered "abort" at once, with no token
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_current: ContextVar[SampleScope | None] = ContextVar("sample_scope", default=None)


@dataclass(eq=False)
class SampleScope:
    """Times are the event loop's, in seconds."""

    task: asyncio.Task[Any] | None = None  # runs the generate function
    requests: set[str] = field(default_factory=set)  # ids that are at an engine now
    started_at: float | None = None  # when it began; once a request was sent, when that was
    has_sent: bool = False
    queued: int = 0  # requests that wait for a free slot at the engines
    queued_s: float = 0.0  # how long later requests than the first have waited for one
    interrupted_at: float | None = None
    num_sampled: int = 0  # tokens that engines have answered with
    was_cut: bool = False  # the last answer of an engine ended with an abort
    was_cancelled: bool = False

    @property
    def interrupted(self) -> bool:
        return self.interrupted_at is not None

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def cancel(self) -> None:
        """For one that does not listen. Once: a further cancellation would break off its cleaning up."""
        if self.task is not None and not self.was_cancelled:
            self.was_cancelled = True
            self.task.cancel()

    def interrupt(self, now: float) -> None:
        """Idempotent; whoever interrupts also aborts `requests` (`InFlight` does)."""
        if self.interrupted_at is None:
            self.interrupted_at = now


def current_scope() -> SampleScope | None:
    """The sample on whose behalf this task runs; None outside of a rollout."""
    return _current.get()


@contextmanager
def use_scope(scope: SampleScope) -> Iterator[SampleScope]:
    """Tasks made inside belong to `scope`."""
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)
