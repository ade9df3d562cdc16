"""An HTTP server that answers /generate like SGLang does, for unit tests of what stands in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Reply = Callable[[dict[str, Any]], Any]


def answer(tokens: list[int], text: str = "", version: str = "0", reason: str = "stop") -> dict[str, Any]:
    """A /generate answer for `tokens`, each with log-prob -0.5."""
    return {
        "text": text,
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "finish_reason": {"type": reason},
            "weight_version": version,
            "cached_tokens": 0,
        },
    }


@asynccontextmanager
async def scripted_engine(reply: Reply) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve `reply(body)`: a dict is the answer, an int an HTTP status; yields (url, bodies received)."""
    received: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        received.append(body)
        result = reply(body)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, int):
            return web.Response(status=result, text="scripted failure")
        return web.json_response(result)

    app = web.Application()
    app.router.add_post("/generate", generate)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")), received
    finally:
        await server.close()
