"""How far engine and trainer agree: log-probs of the same sampled tokens, computed by SGLang and by Megatron-core.

    python benchmarks/logprob_gap.py [MODEL_DIR ...] [--families [NAME ...]] [--num-prompts 16] [--new-tokens 64]
        [--dtype float32]

Starts one engine and one trainer with the weights in MODEL_DIR, samples at temperature 1 from random prompts, and
prints the differences in nats. With --families it does so for a random model of every family
(benchmarks/tiny_models.py), or of those with a NAME in their name, after its way through torch_dist and back: what is
exported is what the engine serves. A family that SGLang does not serve on this device is named with the engine's
reason. Last line: `models=… not_served=… mean_abs=… max_abs=…`, the means and maxima of the worst model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tiny_models import CATALOGUE, make_named
from slime_rl.config import Config, parse_config
from slime_rl.data.batches import RolloutBatch, rollout_batch_from_groups
from slime_rl.engine.ports import free_port
from slime_rl.engine.server import EngineServer
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.generate import append_generation
from slime_rl.trainer.convert import conversion_config, hf_to_torch_dist, torch_dist_to_hf
from slime_rl.trainer.worker import TrainWorker
from slime_rl.types import Group, Sample

MAX_PROMPT_TOKENS = 48


def make_config(model_dir: Path, args: argparse.Namespace, folder: Path) -> Config:
    (folder / "prompts.jsonl").write_text('{"prompt": "unused", "label": "unused"}\n')
    return parse_config(
        [
            *("--hf-checkpoint", str(model_dir), "--prompt-data", str(folder / "prompts.jsonl")),
            *("--run-dir", str(folder / "run"), "--train-dtype", args.dtype),
            *("--max-prompt-len", str(MAX_PROMPT_TOKENS), "--max-response-len", str(args.new_tokens)),
            *("--old-log-probs", "recompute", "--sglang-skip-tokenizer-init"),  # random models have none
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


async def while_alive(server: EngineServer, answers: Coroutine[Any, Any, list[Group]]) -> list[Group]:
    """The answers; RuntimeError as soon as the engine has ended, which then is what it cannot compute."""
    task = asyncio.ensure_future(answers)
    try:
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if (end := server.end_message()) is not None:
                raise RuntimeError(end)
        return task.result()
    finally:
        task.cancel()


def rollouts(config: Config, args: argparse.Namespace) -> RolloutBatch:
    server = EngineServer(config, 0, config.run_dir)
    try:
        server.start()
        prompts = random_prompts(config.model.hf_checkpoint, args.num_prompts, args.seed)
        groups = asyncio.run(while_alive(server, sample(server.url, prompts, args.new_tokens)))
    finally:
        server.stop()
    return rollout_batch_from_groups(groups, step=0, weight_version=0)


def measure(model_dir: Path, args: argparse.Namespace) -> Tensor:
    """Absolute differences in nats of all sampled tokens, `[T]` float32.

    Raises:
        RuntimeError: SGLang does not serve the model.
    """
    with tempfile.TemporaryDirectory() as name:
        config = make_config(model_dir, args, Path(name))
        batch = rollouts(config, args)
        worker = TrainWorker(config, 0, 1, "127.0.0.1", free_port())
        ours = worker.compute_log_probs(batch, "policy")
        worker.shutdown()
    return (ours - batch.ragged("rollout_log_probs").values).abs()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dirs", nargs="*", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--families", nargs="*", metavar="NAME")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    gaps, not_served = [], 0
    with tempfile.TemporaryDirectory() as name:
        for model_dir in [*args.model_dirs, *exported_families(Path(name), args.families)]:
            try:
                gaps.append(measure(model_dir, args))
            except RuntimeError as error:
                not_served += 1
                reasons = [line.strip() for line in str(error).splitlines() if not line.strip().startswith("[")]
                print(f"{model_dir.name}: not served: {reasons[-1]:.200}", flush=True)
                continue
            gap = gaps[-1]
            print(
                f"{model_dir.name} {args.dtype}: {gap.numel()} tokens, mean {gap.mean():.2e}, "
                f"median {torch.quantile(gap, 0.5):.2e}, quantile 0.99 {torch.quantile(gap, 0.99):.2e}, "
                f"largest {gap.max():.2e}",
                flush=True,
            )
    worst = [max((float(number(gap)) for gap in gaps), default=float("nan")) for number in (Tensor.mean, Tensor.max)]
    print(f"models={len(gaps)} not_served={not_served} mean_abs={worst[0]:.2e} max_abs={worst[1]:.2e}")
    return 0


def exported_families(folder: Path, wanted: Sequence[str] | None) -> Iterator[Path]:
    """A folder for each family, as the conversion to torch_dist and back writes it."""
    for name in (n for n in CATALOGUE if wanted is not None and (not wanted or any(w in n for w in wanted))):
        original, exported = folder / "original" / name, folder / name
        make_named(original, name)
        hf_to_torch_dist(conversion_config(original, "families", False), folder / "dist" / name, 1)
        config = conversion_config(original, "families", False)
        options = {"num_workers": 1, "dtype": None, "shard_bytes": 5 * 10**9}
        torch_dist_to_hf(config, folder / "dist" / name / "model", exported, **options)
        yield exported


if __name__ == "__main__":
    sys.exit(main())
