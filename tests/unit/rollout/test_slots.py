from __future__ import annotations

import asyncio
import random

from slime_rl.rollout.slots import Slots


def test_never_more_than_its_slots_and_none_is_lost_by_cancellation() -> None:
    rng = random.Random(0)
    now = most = ended = 0

    async def work(slots: Slots) -> None:
        nonlocal now, most, ended
        async with slots:
            now += 1
            most = max(most, now)
            try:
                await asyncio.sleep(rng.random() * 0.002)
            finally:
                now -= 1
                ended += 1

    async def go() -> None:
        slots = Slots(5)
        tasks = [asyncio.create_task(work(slots)) for _ in range(300)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60):  # all five are free again
            await asyncio.gather(*(work(slots) for _ in range(50)))

    asyncio.run(go())
    assert most == 5 and now == 0 and ended > 100


def test_first_come_first_served() -> None:
    order: list[int] = []

    async def work(slots: Slots, number: int) -> None:
        async with slots:
            order.append(number)
            await asyncio.sleep(0)

    async def go() -> None:
        slots = Slots(1)
        await asyncio.gather(*(work(slots, number) for number in range(20)))

    asyncio.run(go())
    assert order == list(range(20))
