"""What the gateway costs: calls a second through it, as a share of calls a second straight to the router.

    python benchmarks/gateway_overhead.py [--sessions 64] [--turns 6] [--latency-s 1.0] [--tokens 64] [--model DIR]

The agents are a process of their own, as the bare callers are. Every session is a conversation of --turns turns; with
the gateway it sends chat messages, and without it the growing token ids. With --model a real engine serves DIR behind
the real router and answers with exactly --tokens tokens. Otherwise the engine is a stand-in in its own process that
answers after --latency-s, so that only what lies before it is measured: HTTP, rendering, matching, parsing, recording.
The two take turns, --rounds times. Last line: `sessions=… direct=… gateway=… share=…`, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime_rl.config import parse_config  # noqa: E402
from slime_rl.engine.router import RouterProcess  # noqa: E402
from slime_rl.engine.server import EngineServer  # noqa: E402
from slime_rl.rollout.agent.gateway.server import Gateway  # noqa: E402
from slime_rl.rollout.agent.parsing import ParsedTurn  # noqa: E402
from slime_rl.rollout.client import EngineClient  # noqa: E402
from slime_rl.rollout.runtime import RolloutRuntime, freeze_heap, use_runtime  # noqa: E402
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


def agents(pipe: Connection) -> None:
    """The process of the callers: gets (url, keys or number of sessions, turns, settings), answers with seconds."""
    asyncio.run(_agents(pipe))


async def _agents(pipe: Connection) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        while (task := await asyncio.to_thread(pipe.recv)) is not None:
            url, keys, turns, params = task
            started = time.monotonic()
            if isinstance(keys, int):
                await asyncio.gather(*(direct_session(http, url, number, turns, params) for number in range(keys)))
            else:
                await asyncio.gather(*(chat_session(http, url, key, turns) for key in keys))
            pipe.send(time.monotonic() - started)


async def direct_session(
    http: aiohttp.ClientSession, url: str, number: int, turns: int, params: dict[str, Any]
) -> None:
    ids = [5 + number, *range(4, 43)]
    for _ in range(turns):
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": False}
        async with http.post(f"{url}/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            ids = ids + (await answer.json())["output_ids"] + list(range(4, 14))


async def chat_session(http: aiohttp.ClientSession, base_url: str, key: str, turns: int) -> None:
    messages: list[Any] = [{"role": "user", "content": f"what is the matter with you {key[-6:]} today my dear?"}]
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(turns):
        body = {"model": "policy", "messages": messages}
        async with http.post(f"{base_url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            messages.append((await answer.json())["choices"][0]["message"])
        messages.append({"role": "user", "content": "go on, go on"})


class Rates:
    """Calls a second, by the process of the callers."""

    def __init__(self, pipe: Connection, args: argparse.Namespace) -> None:
        self.pipe, self.sessions, self.turns = pipe, args.sessions, args.turns
        self.params = {"max_new_tokens": args.tokens, "temperature": 1.0, "ignore_eos": args.model is not None}

    async def _ask(self, url: str, keys: int | list[str], turns: int) -> float:
        self.pipe.send((url, keys, turns, self.params))
        return self.sessions * turns / await asyncio.to_thread(self.pipe.recv)

    async def direct(self, url: str, turns: int) -> float:
        return await self._ask(url, self.sessions, turns)

    async def through(self, server: Gateway, turns: int) -> float:
        with ExitStack() as stack:
            samples = [Sample(index=i, group_index=0, rollout_id=i, prompt="q") for i in range(self.sessions)]
            sessions = [stack.enter_context(server.session(sample, self.params)) for sample in samples]
            rate = await self._ask(server.base_url, [session.key for session in sessions], turns)
            for session in sessions:
                (made,) = session.samples()
                assert made.metadata["agent"]["num_turns"] == turns
        return rate


async def measure(url: str, rates: Rates, rounds: int, tokenizer: Any) -> tuple[float, float]:
    """Median calls a second (direct, through the gateway), after a round that warms up."""
    found: dict[str, list[float]] = {"direct": [], "gateway": []}
    server = Gateway()
    await server.start()
    async with EngineClient(url, max_in_flight=1024, timeout_s=300) as client:
        with use_runtime(RolloutRuntime(client=client, tokenizer=tokenizer, make_parser=PlainParser)):
            await rates.direct(url, 1)
            await rates.through(server, 1)
            freeze_heap()  # as a run's rollout process does
            for _ in range(rounds):
                found["direct"].append(await rates.direct(url, rates.turns))
                found["gateway"].append(await rates.through(server, rates.turns))
                print({name: round(values[-1], 1) for name, values in found.items()}, flush=True)
    await server.close()
    return statistics.median(found["direct"]), statistics.median(found["gateway"])


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Connection]:
    """`target(pipe, *arguments)` in a process of its own; our end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


@contextmanager
def real_engine(model: Path, folder: Path) -> Iterator[str]:
    """URL of a router with one engine behind it."""
    flags = ("--hf-checkpoint", str(model), "--run-dir", str(folder), "--num-steps", "0", "--device", "cpu")
    config = parse_config([*flags, "--eval-prompt-data", "none", __file__, "--rollout-num-engines", "1"])
    engine, router = EngineServer(config, 0, config.run_dir), RouterProcess(config, config.run_dir)
    try:
        router.start()
        engine.start()
        router.add_worker(engine.url)
        yield router.url
    finally:
        engine.stop()
        router.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--latency-s", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.model is not None:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            url = stack.enter_context(real_engine(args.model, folder / "run"))
        else:
            VOCABULARY.write_tokenizer(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            port = stack.enter_context(process(serve_engine, args.latency_s, args.tokens)).recv()
            url = f"http://127.0.0.1:{port}"
        rates = Rates(stack.enter_context(process(agents)), args)
        direct, through = asyncio.run(measure(url, rates, args.rounds, tokenizer))
    print(f"sessions={args.sessions} direct={direct:.1f} gateway={through:.1f} share={through / direct:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
