"""Production step by step: one task runs the rollout function for each step that was asked for, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer, RolloutFunction
from slime_rl.registry import own_code
from slime_rl.types import Group, RolloutOutput


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
        if ":" not in self.config.rollout.rollout_function_path:  # ours names what fails in it
            return await self.function(self.config, step, self.buffer)
        return await self._produce_by_own(step)

    async def _produce_by_own(self, step: int) -> RolloutOutput:
        """What the function of --rollout-function-path returns, checked; what it raises comes with flag and line."""
        flag, where = f"--rollout-function-path {self.config.rollout.rollout_function_path}", f", for step {step}"
        this = asyncio.current_task()
        try:
            with own_code(flag, where):
                output = await self.function(self.config, step, self.buffer)
        except asyncio.CancelledError:
            if this is not None and this.cancelling():
                raise
            raise ValueError(f"{flag} raised CancelledError{where}") from None
        _check_output(f"{flag} must return", where, output)
        return output


def _check_output(rule: str, where: str, output: Any) -> None:
    if not isinstance(output, RolloutOutput):
        raise ValueError(f"{rule} a RolloutOutput, got {type(output).__name__}{where}")
    groups, metrics = output.groups, output.metrics
    if not isinstance(groups, list) or not groups or not all(isinstance(group, Group) for group in groups):
        raise ValueError(f"{rule} the groups that it took as a list of Group, got {groups!r:.60}{where}")
    is_named = isinstance(metrics, dict) and all(isinstance(name, str) for name in metrics)
    if not is_named or not all(isinstance(value, int | float) for value in metrics.values()):
        raise ValueError(f"{rule} metrics as numbers by name, got {metrics!r:.60}{where}")
