"""How far engine and trainer agree: log-probs of the same sampled tokens, computed by SGLang and by Megatron-core.

    python benchmarks/logprob_gap.py MODEL_DIR [--num-prompts 16] [--new-tokens 64] [--dtype float32]

Starts one engine and one trainer with the weights in MODEL_DIR, samples at temperature 1 from random prompts, and
prints the differences in nats. Last line: `mean_abs=… max_abs=…`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from slime_rl.config import Config, parse_config
from slime_rl.data.batches import RolloutBatch, rollout_batch_from_groups
from slime_rl.engine.ports import free_port
from slime_rl.engine.server import EngineServer
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.generate import append_generation
from slime_rl.trainer.worker import TrainWorker
from slime_rl.types import Group, Sample

MAX_PROMPT_TOKENS = 48


def make_config(args: argparse.Namespace, folder: Path) -> Config:
    (folder / "prompts.jsonl").write_text('{"prompt": "unused", "label": "unused"}\n')
    return parse_config(
        [
            *("--hf-checkpoint", args.model_dir, "--prompt-data", str(folder / "prompts.jsonl")),
            *("--run-dir", str(folder / "run"), "--train-dtype", args.dtype),
            *("--max-prompt-len", str(MAX_PROMPT_TOKENS), "--max-response-len", str(args.new_tokens)),
            *("--old-log-probs", "recompute"),
        ]
    )


def random_prompts(model_dir: str, count: int, seed: int) -> list[list[int]]:
    vocabulary = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
    source = random.Random(seed)
    return [
        [source.randrange(4, vocabulary) for _ in range(source.randrange(4, MAX_PROMPT_TOKENS))] for _ in range(count)
    ]


async def sample(url: str, prompts: list[list[int]], new_tokens: int) -> list[Group]:
    """One response per prompt with its engine log-probs."""
    params = {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True}

    async def one(client: EngineClient, index: int, prompt: list[int]) -> Group:
        record = Sample(index=index, group_index=index, rollout_id=index, prompt="")
        record.set_prompt_tokens(prompt)
        append_generation(record, await client.generate(prompt, params))
        record.reward = 0.0
        return Group(group_index=index, source_index=index, epoch=0, samples=[record])

    async with EngineClient(url, max_in_flight=64, timeout_s=600) as client:
        return list(await asyncio.gather(*(one(client, i, prompt) for i, prompt in enumerate(prompts))))


def rollouts(config: Config, args: argparse.Namespace) -> RolloutBatch:
    server = EngineServer(config, 0, config.run_dir)
    server.start()
    try:
        prompts = random_prompts(args.model_dir, args.num_prompts, args.seed)
        groups = asyncio.run(sample(server.url, prompts, args.new_tokens))
    finally:
        server.stop()
    return rollout_batch_from_groups(groups, step=0, weight_version=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = make_config(args, Path(name))
        batch = rollouts(config, args)
        worker = TrainWorker(config, 0, 1, "127.0.0.1", free_port())
        ours = worker.compute_log_probs(batch, "policy")
    gap = (ours - batch.ragged("rollout_log_probs").values).abs()
    print(f"{args.model_dir} {args.dtype}: {gap.numel()} tokens of {len(batch)} responses")
    for share in (0.5, 0.99):
        print(f"quantile {share}: {torch.quantile(gap, share):.2e}")
    print(f"mean_abs={gap.mean():.2e} max_abs={gap.max():.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
