"""What our rollout loop costs: buffer, group loop and client against a bare asyncio client and transformers' generate.

    python benchmarks/rollout_overhead.py [--rounds 8] [--prompts 128] [--data DIR] [--model DIR --response-len 64]

Ours and the bare client send the same prompts, sampling settings and number of requests in flight to one real engine
through the real router, in turns, so that a busy machine slows both. The bare client knows the token ids already,
posts, and reads the answer's JSON; ours renders and tokenises prompts, keeps the ledger, groups samples, checks
answers, spreads versions over tokens, rewards and filters. `generate` gets the same token ids, all samples of
--generate-batch requests together, padded on the left, with all cores, float32 and its KV cache, while the engine has
nothing to do; it stops as the engine does. --data is made by tools/make_quickstart.py; a temporary one when not given.
Its model is so small that HTTP is most of a request, which is the hardest case; --model has another one generate.

Last line: `ours_req_s=… direct_req_s=… ratio=… ours_tokens_s=… generate_tokens_s=… generate_ratio=…`, medians over
rounds, tokens being those of responses; the ratios are those of the measurements of a round, since the machine's speed
changes from one round to the next by more than the loop costs.
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
from typing import Any, NamedTuple

import aiohttp
import torch

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
SIDES = ("ours", "direct", "generate")


class Rate(NamedTuple):
    """What a side did in a second."""

    requests: float
    tokens: float  # of responses


def make_config(data: Path, model: Path, run_dir: Path, num_prompts: int, response_len: int) -> Config:
    return parse_config(
        [
            *("--hf-checkpoint", str(model), "--prompt-data", str(data / "train.jsonl"), "--no-shuffle"),
            *("--rm-type", "exact", "--max-prompt-len", "64", "--max-response-len", str(response_len)),
            *("--rollout-batch-size", str(num_prompts), "--n-samples-per-prompt", "8"),
            *("--rollout-concurrency", str(IN_FLIGHT), "--rollout-num-engines", "1", "--run-dir", str(run_dir)),
        ]
    )


async def direct(url: str, prompts: list[list[int]], samples: int, params: dict[str, Any]) -> Rate:
    """The least client that keeps IN_FLIGHT requests going."""
    queue = iter([prompt for prompt in prompts for _ in range(samples)])
    tokens = 0

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for prompt in queue:
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": False}
            async with session.post(f"{url}/generate", json=body) as answer:
                content = await answer.json()
                assert answer.status == 200 and content["output_ids"]
                tokens += len(content["output_ids"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begin = time.monotonic()
        await asyncio.gather(*(worker(session) for _ in range(IN_FLIGHT)))
    seconds = time.monotonic() - begin
    return Rate(len(prompts) * samples / seconds, tokens / seconds)


class Ours:
    """The rollout side of a run: its buffer, its client, its loop."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.buffer = LedgerBuffer(config, FilePromptSource(config))
        self.step = 0

    async def __call__(self, url: str) -> Rate:
        """One step."""
        client = EngineClient(url, max_in_flight=IN_FLIGHT, timeout_s=300)
        async with client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=self.tokenizer)):
                begin = time.monotonic()
                output = await group_loop(self.config, self.step, self.buffer)
                seconds = time.monotonic() - begin
        samples = [sample for group in output.groups for sample in group.samples]
        self.buffer.commit(self.step)
        self.step += 1
        return Rate(len(samples) / seconds, sum(sample.response_length for sample in samples) / seconds)


class Generate:
    """transformers' generate on the same requests."""

    def __init__(self, config: Config, tokenizer: Any, batch_size: int) -> None:
        from transformers import AutoModelForCausalLM

        path = config.model.hf_checkpoint
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.config, self.pad, self.batch_size = config, tokenizer.pad_token_id, batch_size

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]]) -> Rate:
        requests = [p for p in prompts for _ in range(self.config.train.n_samples_per_prompt)]
        begin, tokens = time.monotonic(), 0
        for start in range(0, len(requests), self.batch_size):
            part = requests[start : start + self.batch_size]
            longest = max(map(len, part))
            ids = torch.tensor([[self.pad] * (longest - len(p)) + p for p in part])
            attended = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
            out = self.model.generate(
                ids,
                attention_mask=attended,
                do_sample=True,
                temperature=self.config.sampling.rollout_temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.config.sampling.max_response_len,
                pad_token_id=self.pad,
            )
            ends = torch.isin(out[:, longest:], torch.as_tensor(self.model.generation_config.eos_token_id))
            tokens += int((ends.cumsum(1) - ends.long() == 0).sum())  # up to the first end, that included
        seconds = time.monotonic() - begin
        return Rate(len(requests) / seconds, tokens / seconds)


def measure(config: Config, url: str, rounds: int, generate_batch: int) -> dict[str, list[Rate]]:
    tokenizer = load_tokenizer(config)
    rows = [json.loads(line) for line in Path(config.data.prompt_data or "").read_text().splitlines()]
    wanted, samples = config.train.rollout_batch_size, config.train.n_samples_per_prompt
    rates: dict[str, list[Rate]] = {side: [] for side in SIDES}
    ours, generate = Ours(config, tokenizer), Generate(config, tokenizer, generate_batch)
    fence, params = ProcessFence(1, 10.0), train_sampling_params(config)
    freeze_heap()  # as a run's rollout process does; helps every side
    try:
        for number in range(rounds + 1):  # the first one warms up
            part = rows[number * wanted : (number + 1) * wanted]
            prompts = [encode_prompt(config, tokenizer, row["prompt"], {}) for row in part]
            for side in SIDES if number % 2 else reversed(SIDES):
                with use_fence(fence):
                    if side == "generate":
                        rate = generate(prompts)
                    else:
                        rate = asyncio.run(ours(url) if side == "ours" else direct(url, prompts, samples, params))
                if number:
                    rates[side].append(rate)
                    print(
                        f"round {number}: {side} {rate.requests:.1f} requests/s, {rate.tokens:.1f} tokens/s", flush=True
                    )
    finally:
        fence.close()
    return rates


def last_line(rates: dict[str, list[Rate]]) -> str:
    ours, direct_, generate = (rates[side] for side in SIDES)
    requests = statistics.median(a.requests / b.requests for a, b in zip(ours, direct_, strict=True))
    tokens = statistics.median(a.tokens / b.tokens for a, b in zip(ours, generate, strict=True))
    return (
        f"ours_req_s={statistics.median(r.requests for r in ours):.1f} "
        f"direct_req_s={statistics.median(r.requests for r in direct_):.1f} ratio={requests:.3f} "
        f"ours_tokens_s={statistics.median(r.tokens for r in ours):.1f} "
        f"generate_tokens_s={statistics.median(r.tokens for r in generate):.1f} generate_ratio={tokens:.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--response-len", type=int, default=6)
    parser.add_argument("--generate-batch", type=int, default=1024, help="requests of a call of generate")
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
            rates = measure(config, router.url, args.rounds, args.generate_batch)
        finally:
            engine.stop()
            router.stop()
    print(last_line(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
