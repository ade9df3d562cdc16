"""What a served tiny model answers."""

from __future__ import annotations

import asyncio
import random

from slime_rl.rollout.client import EngineClient, Generation


def generate(url: str) -> list[tuple[list[int], Generation]]:
    """Three prompts of ten tokens, always the same, and 16 sampled tokens for each."""
    source = random.Random(0)
    prompts = [[source.randrange(3, 98) for _ in range(10)] for _ in range(3)]

    async def run() -> list[Generation]:
        async with EngineClient(url, max_in_flight=8, timeout_s=600) as client:
            sampling = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
            return await asyncio.gather(*(client.generate(prompt, sampling) for prompt in prompts))

    return list(zip(prompts, asyncio.run(run()), strict=True))
