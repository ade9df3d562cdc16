"""Adapter for multi-turn environments in the manner of the `verifiers` package, which is not needed for it.

    --generate-function-path environment_loop --environment-path my_module:World --rm-type episode

    World = verifiers_environment(make_environment)       # make_environment(row metadata) -> the verifiers-style object

Such an object has `async is_completed(messages, state) -> bool`, `async env_response(messages, state) -> messages` (or
messages and state), optionally `async setup_state(state)`, and `rubric` with `funcs` and `weights`: functions of any of
prompt, completion, answer, state and info that give numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slime_rl.config import Config
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample


def verifiers_environment(make: Callable[[dict[str, Any]], Any]) -> type:
    """An Environment class over what `make` returns for a row's metadata."""

    class World:
        def __init__(self, config: Config, sample: Sample) -> None:
            prompt = sample.prompt
            self.prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            self.inner = make(sample.metadata)
            self.completion: list[dict[str, Any]] = []
            info = sample.metadata.get("info", {})
            self.state: dict[str, Any] = {"prompt": self.prompt, "answer": sample.label, "info": info, "turn": 0}

        async def reset(self) -> EnvironmentStart:
            if hasattr(self.inner, "setup_state"):
                self.state = await self.inner.setup_state(self.state) or self.state
            return EnvironmentStart(messages=self.prompt, tools=getattr(self.inner, "oai_tools", None))

        async def step(self, action: dict[str, Any]) -> EnvironmentStep:
            self.completion.append(action)
            self.state["turn"] += 1
            self.state["completion"] = self.completion
            messages = [*self.prompt, *self.completion]
            if await self.inner.is_completed(messages, self.state):
                return EnvironmentStep(reward=await self._score(), done=True)
            answer = await self.inner.env_response(messages, self.state)
            if isinstance(answer, tuple):
                answer, self.state = answer
            self.completion += answer
            return EnvironmentStep(messages=answer)

        async def _score(self) -> float:
            rubric = self.inner.rubric
            weights = getattr(rubric, "weights", None) or [1.0] * len(rubric.funcs)
            given = {"prompt": self.prompt, "completion": self.completion, "state": self.state}
            given |= {"answer": self.state["answer"], "info": self.state["info"]}
            total = 0.0
            for function, weight in zip(rubric.funcs, weights, strict=True):
                wanted = inspect.signature(function).parameters
                value = function(**{name: value for name, value in given.items() if name in wanted})
                total += weight * float(await value if inspect.isawaitable(value) else value)
            return total

        async def close(self) -> None:
            """Nothing is held."""

    return World
