"""What generate and reward functions may use while they run: the client, the tokenizer, the reward processes.

The rollout manager owns it and sets it for the tasks it starts (a context variable, inherited by asyncio tasks), so
that plugin signatures stay small and nothing lives in a module global.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slime_rl.observability.trace import NO_TRACE, Trace
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.lengths import LengthHistory

if TYPE_CHECKING:
    from slime_rl.rollout.agent.gateway.server import Gateway
    from slime_rl.rollout.agent.parsing import TurnParser

_current: ContextVar[RolloutRuntime] = ContextVar("rollout_runtime")


@dataclass(frozen=True, kw_only=True)
class RolloutRuntime:
    client: EngineClient | None  # None where no engine runs (--loss sft without evaluation)
    tokenizer: Any  # transformers.PreTrainedTokenizerFast
    make_parser: Callable[[], TurnParser] | None = None  # of tool calls and reasoning; called when first needed
    gateway: Gateway | None = None  # started when --agent-path is given
    models: Mapping[str, str] = field(default_factory=dict)  # routers of models beside the policy, by name
    trace: Trace = NO_TRACE  # with --trace, where spans of this process go
    lengths: LengthHistory = field(default_factory=LengthHistory)  # of the responses to each prompt

    @cached_property
    def parser(self) -> TurnParser:
        if self.make_parser is None:
            raise ValueError("no parser of tool calls here: the run's owner puts one into its RolloutRuntime")
        return self.make_parser()

    @property
    def engine(self) -> EngineClient:
        if self.client is None:
            raise ValueError(
                "this run has no engines (--loss sft without --eval-prompt-data), so nothing can be generated"
            )
        return self.client


def freeze_heap() -> None:
    """Exempt what exists now from garbage collection: once, when everything is imported and read.

    A full collection walks all objects; with torch and transformers loaded it stops the event loop for 0.1 s or more.
    """
    gc.collect()
    gc.freeze()


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
