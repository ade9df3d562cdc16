"""JSON over HTTP for rewards that something else computes, retried within a bound.

--reward-url is an address, or `sglang:NAME` for a model of --sglang-config, whose router the run's owner knows.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from slime_rl.config import Config
from slime_rl.config.served_models import SCHEME
from slime_rl.rollout.client import has_no_engine_yet
from slime_rl.rollout.runtime import current_runtime

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
FLAG = "--reward-url"
Find = Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class Service:
    """What --reward-url stands for."""

    url: str  # without a slash at its end; of the router when the model is ours
    headers: Mapping[str, str]
    is_ours: bool
    model: str | None = None  # what requests must call it, where its router serves several models

    @property
    def api_url(self) -> str:
        """Base of the OpenAI-compatible API."""
        return f"{self.url}/v1" if self.is_ours else self.url

    async def engine_url(self) -> str:
        """The address itself, or any engine that the router has: it does not forward every route of SGLang's.

        Raises:
            aiohttp.ClientError: the router has none now, or does not answer.
        """
        if not self.is_ours:
            return self.url
        async with (
            aiohttp.ClientSession(headers=self.headers, raise_for_status=True) as session,
            session.get(f"{self.url}/workers") as answer,
        ):
            workers = [worker for worker in (await answer.json())["workers"] if worker["is_healthy"]]
        urls = [worker["url"] for worker in workers if self.model is None or worker["model_id"] == self.model]
        if not urls:
            raise aiohttp.ClientError(f"no engine behind {self.url}")
        return random.choice(urls).rstrip("/")


def reward_service(config: Config, name: str) -> Service:
    """Where reward `name` is computed.

    Raises:
        ValueError: there is no --reward-url.
    """
    url = config.reward.reward_url
    if url is None:
        raise ValueError(f"--rm-type {name} needs --reward-url")
    if not url.startswith(SCHEME):
        return Service(url.rstrip("/"), {}, is_ours=False)
    model = url.removeprefix(SCHEME)
    router = current_runtime().models[model].rstrip("/")
    named = model if config.router.share_router else None
    return Service(router, config.engine.authorization, is_ours=True, model=named)


async def post_json(
    where: str | Find, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None, flag: str = FLAG
) -> Any:
    """The JSON answer to `body`. Connection errors, 408, 429 and 5xx are retried until `timeout_s` have passed.

    `where` is the URL, or finds it anew for every try.

    Raises:
        ValueError: the body cannot be written as JSON, the service refused it (another 4xx), or its answer is not JSON;
            names `flag`.
        TimeoutError: no answer within `timeout_s`, retries included; names the last failure.
    """
    sent = _sent(body, flag)
    deadline, pause, last = time.monotonic() + timeout_s, FIRST_PAUSE_S, "no attempt was made"
    url = where if isinstance(where, str) else "(not found yet)"
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json", **(headers or {})}) as session:
        while (left := deadline - time.monotonic()) > 0:
            try:
                if not isinstance(where, str):
                    url = await where()
                async with session.post(url, data=sent, timeout=aiohttp.ClientTimeout(total=left)) as answer:
                    if answer.status == 200:
                        return await _json_of(answer, url, flag)
                    last = f"HTTP {answer.status}: {(await answer.read())[:300].decode(errors='replace')}"
                    is_ours = 400 <= answer.status < 500 and answer.status not in (408, 429)
                    if is_ours and not has_no_engine_yet(last):
                        raise ValueError(f"{flag} {url} refused the request: {last}")
            except (aiohttp.ClientError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE_S)
    raise TimeoutError(f"{flag} {url} gave no answer within {timeout_s:g} s (--reward-request-timeout-s); last: {last}")


def _sent(body: Any, flag: str) -> bytes:
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError, RecursionError) as error:  # metadata of the user's own code may hold anything
        raise ValueError(f"{flag}: what would be sent cannot be written as JSON: {error}") from error


async def _json_of(answer: aiohttp.ClientResponse, url: str, flag: str) -> Any:
    try:
        return json.loads(await answer.read())  # JSON is UTF-8, whatever the header says
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {url} answered something that is not JSON: {error}") from error
