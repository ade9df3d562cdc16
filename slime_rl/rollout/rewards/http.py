"""JSON over HTTP for rewards that something else computes, retried within a bound."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


async def post_json(url: str, body: Any, timeout_s: float, flag: str) -> Any:
    """The JSON answer to `body`. Connection errors, 408, 429 and 5xx are retried until `timeout_s` have passed.

    Raises:
        ValueError: the service refused the request (another 4xx), or its answer is not JSON; names `flag`.
        TimeoutError: no answer within `timeout_s`, retries included; names the last failure.
    """
    deadline, pause, last = time.monotonic() + timeout_s, FIRST_PAUSE_S, "no attempt was made"
    async with aiohttp.ClientSession() as session:
        while (left := deadline - time.monotonic()) > 0:
            try:
                async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=left)) as answer:
                    if answer.status == 200:
                        return await _json_of(answer, url, flag)
                    last = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                    if 400 <= answer.status < 500 and answer.status not in (408, 429):
                        raise ValueError(f"{flag} {url} refused the request: {last}")
            except (aiohttp.ClientError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE_S)
    raise TimeoutError(f"{flag} {url} gave no answer within {timeout_s:g} s (--reward-request-timeout-s); last: {last}")


async def _json_of(answer: aiohttp.ClientResponse, url: str, flag: str) -> Any:
    try:
        return await answer.json(content_type=None)
    except ValueError as error:
        raise ValueError(f"{flag} {url} answered something that is not JSON: {error}") from error
