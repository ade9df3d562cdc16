"""A semaphore for thousands of waiters: asyncio's looks at every one of them each time it is acquired."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`async with slots:` holds one of `num_slots`; who waited longest gets the next one."""

    def __init__(self, num_slots: int) -> None:
        self._free = num_slots
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # it was our turn already
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():  # else cancelled while it waited
                turn.set_result(None)
                return
        self._free += 1
