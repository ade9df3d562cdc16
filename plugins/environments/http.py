"""Requests of environments to servers of their own: whatever goes wrong is a ValueError that says where."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

PAUSE_S = 0.5  # before another try, twice as long each time


async def post_json(http: aiohttp.ClientSession, url: str, body: dict[str, Any], tries: int = 1) -> dict[str, Any]:
    """The object that `url` answers with; tried `tries` times where the server fails (5xx) or is not there in time.

    Raises:
        ValueError: no answer in time, another status than 200, or an answer that is no JSON object; names the URL.
    """
    problem = ""
    for attempt in range(tries):
        if attempt:
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            async with http.post(url, json=body) as response:
                if response.status == 200:
                    return _object(url, await response.text(errors="replace"), await _json(response))
                problem = f"answered HTTP {response.status}: {(await response.text(errors='replace'))[:300]}"
                if response.status < 500:
                    break
        except TimeoutError:
            problem = f"gave no answer within --tool-timeout-s {http.timeout.total:g}"
        except aiohttp.ClientError as error:
            problem = f"cannot be asked: {type(error).__name__}: {error}"
    raise ValueError(f"{url} {problem}")


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return await response.json(content_type=None)
    except (ValueError, RecursionError):
        return None


def _object(url: str, text: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{url} must answer a JSON object, got {text[:300]!r}")
    return value
