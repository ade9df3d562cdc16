"""The default rollout function: ask the buffer for prompts until a step's groups are there, then take them.

Consumes waiting prompts, produces admitted groups. It waits for the engines' answers and the rewards; it ends when
`rollout_batch_size` groups are generated, when --max-sampling-rounds is used up, or with the first error.

    reserve ──► run every group at once (InFlight) ──► enough: surplus still running goes back to the buffer ──► take
       ▲                     │
       └───── dropped ───────┘  replaced while the others run: the groups that train are the same, whatever ends first
"""

from __future__ import annotations

import time

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer, RolloutFunction
from slime_rl.registry import ExtensionPoint
from slime_rl.rollout.ages import AgeLimit
from slime_rl.rollout.groups import FAILED, NOTHING_TO_TRAIN, GroupRunner
from slime_rl.rollout.in_flight import InFlight
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import RolloutOutput

ROLLOUT_FUNCTIONS = ExtensionPoint(
    flag="--rollout-function-path",
    protocol=RolloutFunction,
    builtins={
        "group_loop": "slime_rl.rollout.group_loop:group_loop",
        "sft": "slime_rl.rollout.sft:labels_as_responses",
        "dumped": "slime_rl.rollout.dumped:dumped_groups",
    },
)


def rollout_function_name(config: Config) -> str:
    """The rollout function that --rollout-function-path chooses; auto follows --load-rollouts and --loss."""
    name = config.rollout.rollout_function_path
    if config.rollout.load_rollouts is not None:
        return "dumped"
    if name != "auto":
        return name
    return "sft" if config.train.loss == "sft" else "group_loop"


async def group_loop(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    """Generate until the buffer holds a step's groups. Surplus groups wait in the buffer for the next step."""
    started = time.monotonic()
    needed = config.train.rollout_batch_size
    runner = GroupRunner(config)
    flight = InFlight(runner, buffer, current_runtime().lengths)
    ages, max_age = AgeLimit(config.asynchrony.over_age, buffer, runner), config.max_age
    oldest = 0 if max_age is None else step - max_age  # version that may train
    at_once = max(needed, config.buffer.over_sampling_batch_size or 0)
    most, num_begun = config.buffer.max_sampling_rounds * at_once, 0

    def have_enough() -> bool:
        ages.let_go(oldest)
        return len(buffer) >= needed

    try:
        while not have_enough():
            in_play = len(buffer) + len(flight)
            if in_play < needed:  # dropped groups are replaced at once, while the others still run
                if num_begun >= most:
                    raise ValueError(too_many_dropped(config, step, buffer, f"{num_begun} that were begun"))
                groups = ages.reserve(min(at_once - in_play, most - num_begun), oldest)
                num_begun += len(groups)
                flight.start(groups, step)
            await flight.settle()
        await flight.hand_back()
    finally:
        await flight.close()
    ages.let_go(oldest)  # what has finished while it was handed back
    groups = buffer.take(step, needed)
    groups = ages.mask(groups, oldest)
    metrics = {
        "rollout/seconds": time.monotonic() - started,
        "rollout/reward_seconds": runner.reward_seconds,
        "rollout/sampling_rounds": num_begun / at_once,
        **ages.metrics(),
        **flight.metrics(),
    }
    return RolloutOutput(groups=groups, metrics=metrics)


def too_many_dropped(config: Config, step: int, buffer: DataBuffer, spent: str) -> str:
    """Why a step's groups do not come together, for the user."""
    drops = {k.removeprefix("dropped/"): v for k, v in buffer.counts().items() if k.startswith("dropped/")}
    listed = ", ".join(f"{count} dropped for {reason}" for reason, count in sorted(drops.items())) or "none dropped"
    most = max(drops, key=lambda reason: drops[reason], default="")
    return (
        f"step {step}: only {len(buffer)} of {config.train.rollout_batch_size} groups after {spent} "
        f"(--max-sampling-rounds): {listed}. {_advice(most)}"
    )


def _advice(reason: str) -> str:
    """What to do about most groups being dropped for `reason`."""
    if reason.startswith("error_"):
        return "The generate or reward function raises for nearly every group: --rollout-error stop shows where"
    if reason in ("over_age", "stale", "late_samples"):
        return (
            "Groups take too long: give them a higher --sample-deadline-s, --max-staleness, --buffer-max-age or "
            "--max-group-attempts, or shorten --max-response-len"
        )
    if reason in (FAILED, NOTHING_TO_TRAIN):
        return "The generate function gives up on, or masks, nearly everything that it generates"
    return (
        "The filter drops nearly everything: use easier or more varied prompts, a higher --rollout-temperature, or "
        "another --dynamic-filter-path"
    )
