"""A text game in the manner of gymnasium, and the adapter that lets a policy play any such game.

    --generate-function-path environment_loop --environment-path plugins.environments.number_game:GymTextEnvironment
    --rm-type episode

A row names the game: metadata {"environment": {"game": "plugins.environments.number_game:NumberGame", "seed": 3,
"options": {"highest": 20}}}. A game has `reset(seed) -> (text, info)` and
`step(text) -> (text, reward, terminated, truncated, info)`.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import re
from typing import Any

from slime_rl.config import Config
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample


class NumberGame:
    """Find a number between 1 and `highest` in `guesses` tries; each wrong guess is answered with higher or lower."""

    def __init__(self, highest: int = 100, guesses: int = 7) -> None:
        self.highest, self.guesses = highest, guesses

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.secret = random.Random(seed).randint(1, self.highest)
        self.left = self.guesses
        return f"I think of a number from 1 to {self.highest}. You have {self.left} guesses. Name a number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        numbers = re.findall(r"(?<!\d)\d{1,9}(?!\d)", action)  # Python reads no endless ones
        if numbers and int(numbers[-1]) == self.secret:
            return "Right.", 1.0, True, False, {}
        if self.left == 0:
            return f"It was {self.secret}.", 0.0, True, False, {}
        if not numbers:
            return "That is no number. Name a number.", 0.0, False, False, {}
        hint = "Higher." if int(numbers[-1]) < self.secret else "Lower."
        return f"{hint} {self.left} guesses left.", 0.0, False, False, {}


class GymTextEnvironment:
    """An Environment over a gymnasium-style text game, which runs in a thread: it may block."""

    def __init__(self, config: Config, sample: Sample) -> None:
        told = sample.metadata.get("environment")
        if not isinstance(told, dict) or "game" not in told:
            raise ValueError(f"a row needs metadata['environment'] with 'game', got {told!r} in sample {sample.index}")
        module, _, name = told["game"].partition(":")
        self.game = getattr(importlib.import_module(module), name)(**told.get("options", {}))
        self.seed = told.get("seed", sample.group_index)  # the same world for the whole group

    async def reset(self) -> EnvironmentStart:
        text, _ = await asyncio.to_thread(self.game.reset, seed=self.seed)
        return EnvironmentStart(messages=[{"role": "user", "content": text}])

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        text, reward, ended, cut, _ = await asyncio.to_thread(self.game.step, action["content"])
        return EnvironmentStep(
            messages=[{"role": "user", "content": text}], reward=float(reward), done=bool(ended or cut)
        )

    async def close(self) -> None:
        close = getattr(self.game, "close", None)
        if close is not None:
            await asyncio.to_thread(close)
