"""What the gateway costs: calls a second through it, as a share of calls a second straight to the router's interface.

    python benchmarks/gateway_overhead.py [--sessions 64] [--turns 6] [--latency-s 1.0] [--tokens 64]

The engine is a stand-in in a process of its own that answers each request after --latency-s with --tokens tokens, so
that only what lies before it is measured: HTTP, rendering, matching, parsing, recording. Every session is a
conversation of --turns turns. A gateway without cost would give 1. Last line: `sessions=… direct=… gateway=… share=…`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime_rl.rollout.agent.gateway.server import Gateway  # noqa: E402
from slime_rl.rollout.agent.parsing import ParsedTurn  # noqa: E402
from slime_rl.rollout.client import EngineClient  # noqa: E402
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime  # noqa: E402
from slime_rl.types import Sample  # noqa: E402
from tools.make_tool_task import VOCABULARY  # noqa: E402

END_TOKEN = 1


class PlainParser:
    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        return ParsedTurn(content=text)


def serve_engine(pipe: Connection, latency_s: float, num_tokens: int) -> None:
    """The stand-in engine, until its process is ended."""
    tokens = [*([5] * (num_tokens - 1)), END_TOKEN]
    meta = {"output_token_logprobs": [[-0.5, token, None] for token in tokens], "weight_version": "0"}
    body = {"text": "", "output_ids": tokens, "meta_info": {**meta, "finish_reason": {"type": "stop"}}}

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(latency_s)
        return web.json_response(body)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


async def direct_session(client: EngineClient, turns: int) -> None:
    ids = list(range(4, 44))
    for _ in range(turns):
        answer = await client.generate(ids, {"max_new_tokens": 256})
        ids = ids + answer.tokens + list(range(4, 14))


async def gateway_session(server: Gateway, http: aiohttp.ClientSession, turns: int) -> None:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="q")
    with server.session(sample, {"max_new_tokens": 256}) as session:
        messages: list[Any] = [{"role": "user", "content": "what is the matter with you today my dear?"}]
        headers = {"Authorization": f"Bearer {session.key}"}
        for _ in range(turns):
            body = {"model": "policy", "messages": messages}
            async with http.post(f"{server.base_url}/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": "go on, go on"})
        (made,) = session.samples()
        assert made.metadata["agent"]["num_turns"] == turns


async def measure(url: str, args: argparse.Namespace, tokenizer: Any) -> tuple[float, float]:
    """Calls a second (direct, through the gateway), each after a round that warms up."""
    rates = []
    server = Gateway()
    await server.start()
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    async with EngineClient(url, max_in_flight=1024, timeout_s=120) as client, http as h:
        with use_runtime(RolloutRuntime(client=client, tokenizer=tokenizer, make_parser=PlainParser)):
            for run in (lambda turns: direct_session(client, turns), lambda turns: gateway_session(server, h, turns)):
                await asyncio.gather(*(run(1) for _ in range(args.sessions)))
                started = time.monotonic()
                await asyncio.gather(*(run(args.turns) for _ in range(args.sessions)))
                rates.append(args.sessions * args.turns / (time.monotonic() - started))
    await server.close()
    return rates[0], rates[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--latency-s", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=serve_engine, args=(theirs, args.latency_s, args.tokens), daemon=True)
    engine.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            from transformers import AutoTokenizer

            VOCABULARY.write_tokenizer(Path(folder))
            tokenizer = AutoTokenizer.from_pretrained(folder)
        direct, through = asyncio.run(measure(f"http://127.0.0.1:{ours.recv()}", args, tokenizer))
    finally:
        engine.terminate()
        engine.join()
    print(f"sessions={args.sessions} direct={direct:.1f} gateway={through:.1f} share={through / direct:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
