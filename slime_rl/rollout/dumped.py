"""The rollout function of --load-rollouts: nothing is generated, a step is what was dumped for it."""

from __future__ import annotations

import time

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer
from slime_rl.types import RolloutOutput


async def dumped_groups(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    """Take the groups of `step`; no engine is asked."""
    started = time.monotonic()
    groups = buffer.take(step, config.train.rollout_batch_size)
    return RolloutOutput(groups=groups, metrics={"rollout/seconds": time.monotonic() - started})
