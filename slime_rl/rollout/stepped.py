"""Production step by step: one task runs the rollout function for each step that was asked for, in order."""

from __future__ import annotations

import asyncio

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer, RolloutFunction
from slime_rl.types import RolloutOutput


class SteppedProduction:
    """Synchronous, or `--rollout-ahead` steps ahead. Made inside of a rollout runtime, which its tasks inherit."""

    def __init__(self, config: Config, buffer: DataBuffer, function: RolloutFunction, next_step: int) -> None:
        self.config, self.buffer, self.function = config, buffer, function
        self.next_step = next_step
        self._tasks: dict[int, asyncio.Task[RolloutOutput]] = {}

    def weights_are(self, version: int) -> None:
        """Steps are asked for one by one, so nothing depends on it."""

    def submit_through(self, step: int) -> None:
        """Have every step up to `step` produced, in order; returns at once."""
        while self.next_step <= min(step, self.config.train.num_steps - 1):
            previous = self._tasks.get(self.next_step - 1)
            self._tasks[self.next_step] = asyncio.create_task(self._produce(self.next_step, previous))
            self.next_step += 1

    async def take(self, step: int) -> RolloutOutput:
        """Wait until `step` is produced; raises whatever made its production fail, or that of a later step."""
        for task in self._tasks.values():
            if task.done():
                task.result()
        return await self._tasks.pop(step)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)  # cancelled: outcomes no longer matter

    async def _produce(self, step: int, previous: asyncio.Task[RolloutOutput] | None) -> RolloutOutput:
        if previous is not None:
            await previous
        return await self.function(self.config, step, self.buffer)
