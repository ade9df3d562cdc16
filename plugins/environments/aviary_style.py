"""Adapter for environments in the manner of `aviary` (PyPI: fhaviary): tools live in the environment.

    --generate-function-path environment_loop --environment-path my_module:World --rm-type episode

    World = aviary_environment(make_environment)     # make_environment(row metadata) -> the aviary-style object

Such an object has `async reset() -> (messages, tools)` and `async step(action) -> (messages, reward, done, truncated)`,
optionally `async close()`. Messages and tools are pydantic models (`model_dump`). The action is aviary's
ToolRequestMessage, or its Message for a turn without a call; `to_action` makes others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_rl.config import Config
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample


def aviary_action(turn: dict[str, Any]) -> Any:
    """The policy's turn as aviary's own message. Arguments that are no JSON object become none, so that the tool says
    which it wants."""
    from aviary.core import Message, ToolRequestMessage

    calls = turn.get("tool_calls") or []
    if not calls:
        return Message(role="assistant", content=turn["content"])
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}
        for call in calls
        for arguments in [call["function"]["arguments"]]
    ]
    return ToolRequestMessage(content=turn["content"], tool_calls=calls)


def aviary_environment(
    make: Callable[[dict[str, Any]], Any], to_action: Callable[[dict[str, Any]], Any] = aviary_action
) -> type:
    """An Environment class over what `make` returns for a row's metadata."""

    class World:
        def __init__(self, config: Config, sample: Sample) -> None:
            self.inner = make(sample.metadata)

        async def reset(self) -> EnvironmentStart:
            messages, tools = await self.inner.reset()
            return EnvironmentStart(messages=_plain(messages), tools=[tool.model_dump(by_alias=True) for tool in tools])

        async def step(self, action: dict[str, Any]) -> EnvironmentStep:
            messages, reward, done, truncated = await self.inner.step(to_action(action))
            return EnvironmentStep(messages=_plain(messages), reward=float(reward), done=bool(done or truncated))

        async def close(self) -> None:
            if hasattr(self.inner, "close"):
                await self.inner.close()

    return World


def _plain(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them."""
    return [{key: value for key, value in m.model_dump().items() if value is not None} for m in messages]
