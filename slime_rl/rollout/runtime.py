"""What generate and reward functions may use while they run: the client, the tokenizer, the reward processes.

The rollout manager owns it and sets it for the tasks it starts (a context variable, inherited by asyncio tasks), so
that plugin signatures stay small and nothing lives in a module global.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.lengths import LengthHistory

_current: ContextVar[RolloutRuntime] = ContextVar("rollout_runtime")


@dataclass(frozen=True, kw_only=True)
class RolloutRuntime:
    client: EngineClient | None  # None where no engine runs (--loss sft without evaluation)
    tokenizer: Any  # transformers.PreTrainedTokenizerFast
    lengths: LengthHistory = field(default_factory=LengthHistory)  # of the responses to each prompt

    @property
    def engine(self) -> EngineClient:
        if self.client is None:
            raise ValueError(
                "this run has no engines (--loss sft without --eval-prompt-data), so nothing can be generated"
            )
        return self.client


def current_runtime() -> RolloutRuntime:
    """The runtime of the rollout that calls us; LookupError outside of one."""
    return _current.get()


@contextmanager
def use_runtime(runtime: RolloutRuntime) -> Iterator[None]:
    token = _current.set(runtime)
    try:
        yield
    finally:
        _current.reset(token)
