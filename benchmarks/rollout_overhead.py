"""What our rollout loop costs: requests/s through buffer, group loop and client, against a bare asyncio client.

    python benchmarks/rollout_overhead.py [--rounds 8] [--prompts 128] [--data DIR] [--model DIR --response-len 64]

Both send the same prompts, sampling settings and number of requests in flight to one real engine through the real
router, in turns, so that a busy machine slows both. The bare client knows the token ids already, posts, and reads the
answer's JSON; ours renders and tokenises prompts, keeps the ledger, groups samples, checks answers, spreads versions
over tokens, rewards and filters. --data is made by tools/make_quickstart.py; a temporary one when not given. Its model
is so small that HTTP is most of a request, which is the hardest case; --model has another one generate. Last line:
`ours_req_s=… direct_req_s=… ratio=…`, medians over rounds; the ratio is that of the two measurements of a round, since
the machine's speed changes from one round to the next by more than the loop costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config, parse_config
from slime_rl.data.rendering import load_tokenizer
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.generate import train_sampling_params
from slime_rl.rollout.group_loop import group_loop
from slime_rl.rollout.groups import encode_prompt
from slime_rl.rollout.rewards.fence import ProcessFence, use_fence
from slime_rl.rollout.runtime import RolloutRuntime, freeze_heap, use_runtime
from tools.make_quickstart import main as make_quickstart

IN_FLIGHT = 128


def make_config(data: Path, model: Path, run_dir: Path, num_prompts: int, response_len: int) -> Config:
    return parse_config(
        [
            *("--hf-checkpoint", str(model), "--prompt-data", str(data / "train.jsonl"), "--no-shuffle"),
            *("--rm-type", "exact", "--max-prompt-len", "64", "--max-response-len", str(response_len)),
            *("--rollout-batch-size", str(num_prompts), "--n-samples-per-prompt", "8"),
            *("--rollout-concurrency", str(IN_FLIGHT), "--rollout-num-engines", "1", "--run-dir", str(run_dir)),
        ]
    )


async def direct(url: str, prompts: list[list[int]], samples: int, params: dict[str, Any]) -> float:
    """Requests/s of the least client that keeps IN_FLIGHT requests going."""
    queue = iter([prompt for prompt in prompts for _ in range(samples)])

    async def worker(session: aiohttp.ClientSession) -> None:
        for prompt in queue:
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": False}
            async with session.post(f"{url}/generate", json=body) as answer:
                content = await answer.json()
                assert answer.status == 200 and content["output_ids"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begin = time.monotonic()
        await asyncio.gather(*(worker(session) for _ in range(IN_FLIGHT)))
    return len(prompts) * samples / (time.monotonic() - begin)


class Ours:
    """The rollout side of a run: its buffer, its client, its loop."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.buffer = LedgerBuffer(config, FilePromptSource(config))
        self.step = 0

    async def __call__(self, url: str) -> float:
        """Requests/s of one step."""
        client = EngineClient(url, max_in_flight=IN_FLIGHT, timeout_s=300)
        async with client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=self.tokenizer)):
                begin = time.monotonic()
                output = await group_loop(self.config, self.step, self.buffer)
                seconds = time.monotonic() - begin
        num_samples = sum(len(group.samples) for group in output.groups)
        self.buffer.commit(self.step)
        self.step += 1
        return num_samples / seconds


def measure(config: Config, url: str, rounds: int) -> dict[str, list[float]]:
    tokenizer = load_tokenizer(config)
    rows = [json.loads(line) for line in Path(config.data.prompt_data or "").read_text().splitlines()]
    wanted = config.train.rollout_batch_size
    rates: dict[str, list[float]] = {"ours": [], "direct": []}
    ours = Ours(config, tokenizer)
    fence = ProcessFence(1, 10.0)
    freeze_heap()  # as a run's rollout process does; helps both sides
    try:
        for number in range(rounds + 1):  # the first one warms up
            part = rows[number * wanted : (number + 1) * wanted]
            prompts = [encode_prompt(config, tokenizer, row["prompt"], {}) for row in part]
            order = ("ours", "direct") if number % 2 else ("direct", "ours")
            for name in order:
                with use_fence(fence):
                    samples = config.train.n_samples_per_prompt
                    params = train_sampling_params(config)
                    rate = asyncio.run(ours(url) if name == "ours" else direct(url, prompts, samples, params))
                if number:
                    rates[name].append(rate)
                    print(f"round {number}: {name} {rate:.1f} requests/s", flush=True)
    finally:
        fence.close()
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--response-len", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder) / "data"
        if args.data is None:
            make_quickstart(["--output", str(data)])
        config = make_config(data, args.model or data / "model", Path(folder) / "run", args.prompts, args.response_len)
        engine, router = EngineServer(config, 0, config.run_dir), RouterProcess(config, config.run_dir)
        try:
            router.start()
            engine.start()
            router.add_worker(engine.url)
            rates = measure(config, router.url, args.rounds)
        finally:
            engine.stop()
            router.stop()
    ours, bare = statistics.median(rates["ours"]), statistics.median(rates["direct"])
    ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["direct"], strict=True))
    print(f"ours_req_s={ours:.1f} direct_req_s={bare:.1f} ratio={ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
