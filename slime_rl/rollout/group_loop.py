"""The default rollout function: ask the buffer for prompts until a step's groups are there, then take them.

Consumes waiting prompts, produces admitted groups. It waits for the engines' answers and the rewards; it ends when
`rollout_batch_size` groups are generated, when --max-sampling-rounds is used up, or with the first error.

    reserve ──► run every group at once ──► kept: admit · filtered: drop(reason) · surplus still running: requeue
"""

from __future__ import annotations

import asyncio
import time

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer, RolloutFunction
from slime_rl.registry import ExtensionPoint
from slime_rl.rollout.generate import train_sampling_params
from slime_rl.rollout.groups import GroupRunner, reset
from slime_rl.types import Group, RolloutOutput

ROLLOUT_FUNCTIONS = ExtensionPoint(
    flag="--rollout-function-path",
    protocol=RolloutFunction,
    builtins={
        "group_loop": "slime_rl.rollout.group_loop:group_loop",
        "sft": "slime_rl.rollout.sft:labels_as_responses",
    },
)


def rollout_function_name(config: Config) -> str:
    """The rollout function that --rollout-function-path chooses; auto follows --loss."""
    name = config.rollout.rollout_function_path
    if name != "auto":
        return name
    return "sft" if config.train.loss == "sft" else "group_loop"


async def group_loop(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    """Generate until the buffer holds a step's groups. Surplus groups wait in the buffer for the next step."""
    started = time.monotonic()
    needed = config.train.rollout_batch_size
    runner = GroupRunner(config)
    rounds = 0
    while len(buffer) < needed:
        rounds += 1
        if rounds > config.buffer.max_sampling_rounds:
            raise ValueError(
                f"step {step}: only {len(buffer)} of {needed} groups after {config.buffer.max_sampling_rounds} rounds "
                f"(--max-sampling-rounds): {_drops(buffer)}. The filter drops nearly everything: use easier or more "
                "varied prompts, a higher --rollout-temperature, or another --dynamic-filter-path"
            )
        missing = needed - len(buffer)
        asked = max(missing, config.buffer.over_sampling_batch_size or 0)
        await _run_round(runner, buffer, buffer.reserve(asked), needed)
    groups = buffer.take(step, needed)
    metrics = {
        "rollout/seconds": time.monotonic() - started,
        "rollout/reward_seconds": runner.reward_seconds,
        "rollout/sampling_rounds": float(rounds),
    }
    return RolloutOutput(groups=groups, metrics=metrics)


async def _run_round(runner: GroupRunner, buffer: DataBuffer, groups: list[Group], needed: int) -> None:
    """Run `groups` at once; stop early once the buffer holds `needed`, and hand the rest back."""
    params = train_sampling_params(runner.config)
    running = {asyncio.create_task(runner.run(group, params)): group for group in groups}
    try:
        while running and len(buffer) < needed:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group = running.pop(task)
                settle(buffer, group, task.result())
    finally:
        await _hand_back(buffer, running)


def settle(buffer: DataBuffer, group: Group, reason: str | None) -> None:
    """Enter a finished group into the ledger: admitted, or dropped for `reason`."""
    if reason is None:
        buffer.admit(group)
    else:
        buffer.drop(group, reason)


async def _hand_back(buffer: DataBuffer, running: dict[asyncio.Task[str | None], Group]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)  # cancelled: their outcome no longer matters
    for group in running.values():
        reset(group.samples)
        buffer.requeue(group)


def _drops(buffer: DataBuffer) -> str:
    drops = {k.removeprefix("dropped/"): v for k, v in buffer.counts().items() if k.startswith("dropped/")}
    return ", ".join(f"{count} dropped for {reason}" for reason, count in sorted(drops.items())) or "none dropped"
