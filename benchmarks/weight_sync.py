"""How fast weights get to the engines, by each transport, next to a copy in memory of the same bytes.

    python benchmarks/weight_sync.py MODEL_DIR [--engines 2] [--rounds 6] [--bucket-bytes N ...]

Two engines serve MODEL_DIR in float32 on the CPU. Every transport sends the whole model `rounds` times, each time after
an optimizer step, through the same sender as a training run's (pause, buckets, version, resume included). Each time is
taken next to memcpy of the same bytes: a copy from tensor to tensor for each engine, since each gets them all.
Afterwards every parameter of every engine is compared
with the trainer's, bit for bit, by its SHA-256. For deltas the weights are bfloat16; a step is a real one: loss of a
few random tokens, AdamW with --lr.

A row a transport; last line `best_vs_memcpy=… delta_share=…`: memcpy's seconds through the best transport's, median
over the rounds but the first, and the share of bfloat16 values that a step changed. Exit code 1 when an engine differs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_rl.config import Config, parse_config
from slime_rl.engine.control import EngineControl
from slime_rl.engine.server import EngineServer
from slime_rl.weight_sync.bucket import split_buckets, tied_names
from slime_rl.weight_sync.sender import make_sender

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MEGA = 1e6


def make_config(model: Path, folder: Path, transport: str, *flags: str) -> Config:
    return parse_config(
        [
            *("--hf-checkpoint", str(model), "--run-dir", str(folder), "--num-steps", "0"),
            *("--eval-prompt-data", "none", __file__, "--weight-sync", transport, "--device", "cpu", *flags),
        ]
    )


class Trainer:
    """Stands for the trainer: a transformers model with AdamW."""

    def __init__(self, path: Path, lr: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self.skip = tied_names(str(path))

    def step(self) -> None:
        """One update on the likelihood of random tokens, with Adam's moments of the steps before."""
        tokens = torch.randint(10, self.model.config.vocab_size, (2, 64))
        self.model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: tensor.to(dtype) for name, tensor in state.items() if name not in self.skip}


def memcpy_seconds(weights: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> float:
    """Of a copy into every target, one after the other; torch uses all cores for each tensor."""
    started = time.perf_counter()
    for target in targets:
        for name, tensor in weights.items():
            target[name].copy_(tensor)
    return time.perf_counter() - started


def expected_hashes(weights: dict[str, Tensor], names: list[str]) -> dict[str, str]:
    """What SGLang's weights checker must report for parameters `names` that hold these weights in float32."""
    found = {}
    for name in names:
        part = next((part for part in FUSED if part in name), None)
        sources = [name] if part is None else [name.replace(part, source) for source in FUSED[part]]
        content = torch.cat([weights[source].float() for source in sources]).contiguous()
        found[name] = hashlib.sha256(content.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return found


async def differing(urls: list[str], weights: dict[str, Tensor]) -> list[str]:
    """Parameters of any engine that are not bit for bit the trainer's."""
    wrong = []
    for url in urls:
        async with EngineControl(url) as engine:
            answer = await engine.call("POST", "/weights_checker", {"action": "checksum"})
        for rank in answer["ranks"]:
            own = rank["checksums"]
            own.pop("lm_head.weight", None) if "lm_head.weight" not in weights else None  # tied to the embedding
            wanted = expected_hashes(weights, list(own))
            wrong += [f"{url} {name}" for name, value in own.items() if wanted[name] != value]
            assert own, "the engine reports no parameter"
    return wrong


def measure(config: Config, urls: list[str], trainer: Trainer, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """One transport: rounds of step, copy, send."""
    sender = make_sender(config, urls)
    sends, copies, wrong, report = [], [], [], None
    weights = trainer.weights(dtype)
    targets = [{name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in urls]
    limit = config.weight_sync.bucket_bytes("cpu")
    try:
        for version in range(1, rounds + 1):
            trainer.step()
            weights = trainer.weights(dtype)
            copies.append(memcpy_seconds(weights, targets))

            def stream(weights: dict[str, Tensor] = weights) -> Iterator[tuple[str, Tensor]]:
                yield from weights.items()

            report = sender.send(split_buckets(stream(), limit), version)
            assert report.updated == urls, report.failed
            sends.append(report.seconds)
        wrong = asyncio.run(differing(urls, weights))
    finally:
        sender.close()
    assert report is not None
    return {
        "seconds": statistics.median(sends[1:]),
        "memcpy": statistics.median(copies[1:]),
        "first": sends[0],
        "bytes": report.num_bytes,
        "share": report.changed_share,
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--transports", nargs="+", default=["tensor", "distributed", "disk", "disk-delta"])
    parser.add_argument("--bucket-bytes", type=int, nargs="+", default=[], help="try the tensor transport with these")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="sync_") as name:
        folder = Path(name)
        base = make_config(args.model, folder, "tensor", "--train-dtype", "float32", "--max-response-len", "64")
        engines = [EngineServer(base, index, folder) for index in range(args.engines)]
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(EngineServer.start, engines))
            return run(args, folder, [engine.url for engine in engines])
        finally:
            for engine in engines:
                engine.stop()


def run(args: argparse.Namespace, folder: Path, urls: list[str]) -> int:
    trainer = Trainer(args.model, args.lr)
    cases = [(transport, ()) for transport in args.transports]
    cases += [("tensor", ("--weight-sync-bucket-bytes", str(size))) for size in args.bucket_bytes]
    best, share, num_wrong = 0.0, 1.0, 0
    for number, (transport, flags) in enumerate(cases):
        is_delta = transport == "disk-delta"
        dtype = torch.bfloat16 if is_delta else torch.float32
        config = make_config(args.model, folder / str(number), transport, *flags)
        found = measure(config, urls, trainer, args.rounds, dtype)
        ratio = found["memcpy"] / found["seconds"]
        num_wrong += len(found["wrong"])
        if is_delta:
            share = found["share"]
        else:
            best = max(best, ratio)
        print(
            f"{' '.join((transport, *flags))}: {found['seconds']:.3f} s (first {found['first']:.3f} s), "
            f"{found['bytes'] / MEGA:.1f} MB to each engine, {found['bytes'] / found['seconds'] / MEGA:.0f} MB/s; "
            f"memcpy to each {found['memcpy']:.3f} s; {100 * ratio:.0f} % of memcpy; values sent {found['share']:.4f}; "
            f"parameters that differ: {len(found['wrong'])} {found['wrong'][:2]}",
            flush=True,
        )
    print(f"best_vs_memcpy={best:.3f} delta_share={share:.4f}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
