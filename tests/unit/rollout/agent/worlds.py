"""Environments and agents for the tests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

from plugins.agents.verl_style import from_verl
from plugins.environments.aviary_style import aviary_environment
from plugins.environments.verifiers_style import verifiers_environment
from slime_rl.types import EnvironmentStart, EnvironmentStep


class NoMessages:
    """A world that says nothing although it goes on."""

    closed = 0

    def __init__(self, config: Any, sample: Any) -> None:
        self.sample = sample

    async def reset(self) -> EnvironmentStart:
        return EnvironmentStart(messages=[{"role": "user", "content": "go"}])

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        return EnvironmentStep()

    async def close(self) -> None:
        type(self).closed += 1


class WrongStep(NoMessages):
    async def step(self, action: dict[str, Any]) -> Any:
        return ("text", 1.0, True)


class Scripted(NoMessages):
    """Answers what the test sets."""

    start: ClassVar[dict[str, Any]] = {"messages": [{"role": "user", "content": "go"}]}
    answer: ClassVar[dict[str, Any]] = {"reward": 1.0, "done": True}
    closing = "well"

    async def reset(self) -> EnvironmentStart:
        return EnvironmentStart(**self.start)

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        return EnvironmentStep(**self.answer)

    async def close(self) -> None:
        if self.closing == "raise":
            raise RuntimeError("no")
        if self.closing == "hang":
            await asyncio.sleep(600)


class NotAWorld:
    async def reset(self) -> None: ...


class DoubleCheck:
    """In the manner of verifiers: asks once more, then scores both answers."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.rubric = SimpleNamespace(funcs=[last_is_right, number_of_turns], weights=[1.0, 0.1])

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "asked": False}

    async def is_completed(self, messages: list[dict[str, Any]], state: dict[str, Any]) -> bool:
        return state["asked"]

    async def env_response(self, messages: list[dict[str, Any]], state: dict[str, Any]) -> Any:
        return [{"role": "user", "content": "Sure?"}], {**state, "asked": True}


def last_is_right(completion: list[dict[str, Any]], answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def number_of_turns(state: dict[str, Any]) -> float:
    return float(state["turn"])


DoubleCheckWorld = verifiers_environment(DoubleCheck)


class Model(SimpleNamespace):
    """Dumps as a pydantic model does."""

    def model_dump(self, by_alias: bool = False) -> dict[str, Any]:
        return dict(vars(self))


class Counter:
    """In the manner of aviary: the policy must count up to a number with a tool."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.target, self.now = metadata["target"], 0

    async def reset(self) -> tuple[list[Model], list[Model]]:
        schema = {"name": "add", "description": "Add n.", "parameters": {"type": "object", "properties": {"n": {}}}}
        asked = Model(role="user", content=f"Count to {self.target}", info=None)
        return [asked], [Model(type="function", function=schema)]

    async def step(self, action: Model) -> tuple[list[Model], float, bool, bool]:
        if not action.tool_calls:
            return [Model(role="user", content="Call a tool.")], 0.0, False, False
        (call,) = action.tool_calls
        self.now += call["function"]["arguments"]["n"]
        told = Model(role="tool", name="add", tool_call_id=call["id"], content=str(self.now))
        return [told], float(self.now == self.target), self.now >= self.target, False


CounterWorld = aviary_environment(Counter, lambda turn: Model(**{"tool_calls": None, **turn}))


class TwoTurns:
    """In the manner of verl's AgentLoop: samples, appends a hint, samples again."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any = None) -> None:
        self.server_manager, self.tokenizer = server_manager, tokenizer

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        prompt = self.tokenizer.encode(row["raw_prompt"][0]["content"], add_special_tokens=False)
        first = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=sampling_params)
        hint = self.tokenizer.encode(" Sure? ", add_special_tokens=False)
        ids = prompt + first.token_ids + hint
        second = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
        mask = [1] * len(first.token_ids) + [0] * len(hint) + [1] * len(second.token_ids)
        response = first.token_ids + hint + second.token_ids
        return SimpleNamespace(
            prompt_ids=prompt, response_ids=response, response_mask=mask, num_turns=2, reward_score=0.5
        )


class Retokenising(TwoTurns):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        output = await super().run(sampling_params, **row)
        output.response_ids[0] += 1
        return output


generate = from_verl(TwoTurns)
retokenising = from_verl(Retokenising)
