"""A train step against bare forward, backward and AdamW of the same packed tokens in plain torch, and sgemm's limit.

    python benchmarks/train_step.py [--model quickstart | smollm2-135m | MODEL_DIR] [--rounds 7] [--threads 2]

Ours is all that a step of training is: batch in, checks, advantages, packing, PPO loss with its metrics, clipping,
optimizer. Bare is the transformers model on the very same tokens in micro-batches with the same rows, sequences ordered
by length so that each block of equal lengths is one attention call on a view, logits only where a response token is
predicted, the same loss, clip_grad_norm_ and AdamW(fused=True); its advantages and its packing are made before the
clock runs. Twice: every prompt of a group computed once, as a run does, and (--no-share-prompts) once a sample. Both
sides run in turn in one process; a ratio is the median of the ratios of the rounds. The first step of both starts from
the same weights: its loss and gradient norm must agree.

Models: the quickstart's and the shape of SmolLM2-135M have random weights; a folder is any Hugging Face model that both
sides know. The limit is the step's matrix products (counted in the bare one) at the best GFLOP/s that float32 matrix
products reached between the rounds. Last line: `ours_s=… bare_s=… limit_s=… ratio=…`, of the case with the worse ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.trainer import SMOLLM2_135M
from benchmarks.trainer_cases import make_config, open_worker
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.ragged import Ragged
from tools.make_quickstart import Vocabulary, write_model

LR = 1e-6
ENGINE_LOG_PROB = -5.0  # of every token; the old policy's where a step has several updates
NO_SPECIAL = 8  # transformers gives the embedding of a padding token no gradient; ids from here on are none
SGEMM = (1024, 2048)  # edges of the square products that are tried for the limit
GIGA = 1e9


@dataclass(frozen=True)
class Shape:
    """A step as the model's example has it: the quickstart's, and that of the comparison with TRL."""

    prompts: int
    samples: int
    prompt_len: tuple[int, int]
    response_len: tuple[int, int]
    updates: int = 1
    max_tokens: int = 8192  # of a micro-batch


SHAPES = {
    "quickstart": Shape(prompts=128, samples=8, prompt_len=(11, 11), response_len=(2, 6), updates=4),
    "smollm2-135m": Shape(prompts=8, samples=8, prompt_len=(40, 50), response_len=(8, 32), max_tokens=1024),
}


def make_batch(shape: Shape, vocab_size: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)

    def integers(bounds: tuple[int, int], count: int) -> Tensor:
        return torch.randint(bounds[0], bounds[1] + 1, (count,), generator=generator)

    n, ids = shape.prompts * shape.samples, (NO_SPECIAL, vocab_size - 1)
    prompts = [integers(ids, int(size)) for size in integers(shape.prompt_len, shape.prompts)]
    lengths = integers(shape.response_len, n)
    rows = [torch.cat([prompts[i // shape.samples], integers(ids, int(r))]) for i, r in enumerate(lengths)]
    groups = torch.arange(n) // shape.samples
    tensors: dict[str, Any] = {
        "tokens": Ragged.from_list(rows, torch.int64),
        "prompt_lengths": torch.tensor([len(prompts[int(group)]) for group in groups]),
        "loss_mask": Ragged.from_list([torch.ones(int(r)) for r in lengths], torch.float32),
        "rollout_log_probs": Ragged.from_list([torch.full((int(r),), ENGINE_LOG_PROB) for r in lengths], torch.float32),
        "weight_versions": Ragged.from_list([torch.zeros(int(r)) for r in lengths], torch.int32),
        "rewards": torch.rand(n, generator=generator),
        "group_ids": groups,
        "rollout_ids": torch.arange(n),
        "sample_ids": torch.arange(n),
        "truncated": torch.zeros(n, dtype=torch.bool),
        "update_ids": groups // (shape.prompts // shape.updates),
    }
    return RolloutBatch(tensors, None, {"step": 0, "weight_version": 0, "num_samples": n})


@dataclass(frozen=True)
class Block:
    """Sequences with as many queries, and keys, each: the next count x queries tokens."""

    count: int
    queries: int
    keys: Tensor | None  # [count, k] positions; None: the queries' own, causally
    mask: Tensor | None  # [queries, k] bool


@dataclass(frozen=True)
class Packed:
    """A micro-batch of the bare loop, ready to compute."""

    ids: Tensor  # [1, t]
    positions: Tensor  # [1, t]
    blocks: list[Block]
    predict_at: Tensor  # [T]
    targets: Tensor  # [T]
    advantages: Tensor  # [T]
    old_log_probs: Tensor | None  # [T]; None: the old policy is the current one


def pack(batch: RolloutBatch, rows: list[int], advantages: Tensor, is_shared: bool) -> Packed:
    """Sequences of `rows` by length; with `is_shared` each prompt once, then responses by both lengths."""
    tokens, prompt_lengths = batch.ragged("tokens"), batch.dense("prompt_lengths").tolist()
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    blocks: list[Block] = []
    predict_at, targets, chosen = [], [], []
    end = 0

    def append(part: Tensor, first_position: int) -> Tensor:
        nonlocal end
        ids.append(part)
        positions.append(torch.arange(first_position, first_position + len(part)))
        end += len(part)
        return torch.arange(end - len(part), end)

    def predict(row: int, at: Tensor, response: Tensor) -> None:
        predict_at.append(at)
        targets.append(response)
        chosen.append(advantages[row].expand(len(response)))

    if not is_shared:
        for members in grouped(rows, lambda row: (len(tokens[row]),)):
            for row in members:
                own, start = append(tokens[row], 0), prompt_lengths[row]
                predict(row, own[start - 1 : -1], tokens[row][start:])
            blocks.append(Block(len(members), len(tokens[members[0]]), None, None))
    else:
        group_of = batch.dense("group_ids").tolist()
        firsts = list({group_of[row]: row for row in reversed(rows)}.values())
        prompt_at: dict[int, Tensor] = {}
        for members in grouped(firsts, lambda row: (prompt_lengths[row],)):
            size = prompt_lengths[members[0]]
            for row in members:
                prompt_at[group_of[row]] = append(tokens[row][:size], 0)
            blocks.append(Block(len(members), size, None, None))
        for members in grouped(rows, lambda row: (prompt_lengths[row], len(tokens[row]))):
            keys, start = [], prompt_lengths[members[0]]
            for row in members:
                own = append(tokens[row][start:-1], start)  # nothing is predicted from a last token
                keys.append(torch.cat([prompt_at[group_of[row]], own]))
                predict(row, keys[-1][start - 1 :], tokens[row][start:])
            queries = len(tokens[members[0]]) - start - 1
            if queries:
                mask = torch.ones(queries, start + queries, dtype=torch.bool).tril(start)
                blocks.append(Block(len(members), queries, torch.stack(keys), mask))
    at, wanted, gains = (torch.cat(part) for part in (predict_at, targets, chosen))
    many_updates = len(batch.dense("update_ids").unique()) > 1
    old = torch.full((len(at),), ENGINE_LOG_PROB) if many_updates else None
    return Packed(torch.cat(ids)[None], torch.cat(positions)[None], blocks, at, wanted, gains, old)


def grouped(rows: list[int], key: Callable[[int], tuple[int, ...]]) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def blockwise(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attention of packed `[1, h, t, d]` for transformers, block by block -> `[1, t, h, d]`."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs, at = [], 0
    for block in given["blocks"]:
        span = slice(at, at + block.count * block.queries)
        at = span.stop
        q = query[span].unflatten(0, (block.count, block.queries))
        if block.keys is None:
            k, v = (x[span].unflatten(0, (block.count, block.queries)) for x in (key, value))
        else:
            k, v = (x.index_select(0, block.keys.flatten()).unflatten(0, block.keys.shape) for x in (key, value))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, block.mask, is_causal=block.mask is None, scale=given["scaling"], enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


class BareLoop:
    """What the same step is at least."""

    def __init__(self, path: Path) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("blockwise", blockwise)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="blockwise")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.last: dict[str, float] = {}

    def step(self, updates: list[list[Packed]]) -> None:
        losses, norms = [], []
        for micro_batches in updates:
            count = sum(len(micro.targets) for micro in micro_batches)
            self.optimizer.zero_grad(set_to_none=False)
            total = 0.0
            for micro in micro_batches:
                loss = self.loss(micro) / count
                loss.backward()
                total += loss.detach()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            losses.append(float(total))
            self.optimizer.step()
        self.last = {"train/loss": statistics.fmean(losses), "train/grad_norm": statistics.fmean(norms)}

    def loss(self, micro: Packed) -> Tensor:
        hidden = self.model.model(
            input_ids=micro.ids, position_ids=micro.positions, use_cache=False, blocks=micro.blocks
        ).last_hidden_state
        logits = self.model.lm_head(hidden[0].index_select(0, micro.predict_at))
        log_probs = -F.cross_entropy(logits, micro.targets, reduction="none")
        old = log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
        ratio = (log_probs - old).exp()
        return -torch.minimum(ratio * micro.advantages, ratio.clamp(0.8, 1.2) * micro.advantages).sum()


def sgemm_gflops(size: int) -> float:
    """Best GFLOP/s of three square float32 products."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    return 2 * size**3 / min(timed(lambda: a @ b) for _ in range(3)) / GIGA


def count_flops(step: Callable[[], None]) -> int:
    """Of the matrix products and attention calls of a step, backward included."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclass
class Found:
    """Seconds of every round of one case, and what a step does."""

    ours: list[float]
    inside: list[float]  # of ours: forward, backward and optimizer alone
    bare: list[float]
    gflops: list[float]
    tokens: int  # that pass through the model
    flops: int
    difference: float  # relative, of loss and gradient norm of the first step

    @property
    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.ours, self.bare, strict=True))

    @property
    def limit_s(self) -> float:
        return self.flops / max(self.gflops) / GIGA


def measure(path: Path, shape: Shape, vocab_size: int, is_shared: bool, rounds: int, threads: int) -> Found:
    flags = [
        *("--train-threads-per-worker", str(threads), "--max-tokens-per-worker", str(shape.max_tokens)),
        *("--lr", str(LR), "--no-grpo-std-normalization", "--num-updates-per-rollout", str(shape.updates)),
        *("--old-log-probs", "rollout" if shape.updates > 1 else "auto"),
        "--share-prompts" if is_shared else "--no-share-prompts",
    ]
    batch = make_batch(shape, vocab_size)
    rewards = batch.dense("rewards").view(shape.prompts, shape.samples)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    with open_worker(make_config(path, *flags, groups=shape.prompts, samples=shape.samples)) as worker:
        split = split_as_ours(worker.state, batch, shape.updates)
        if is_shared and not worker.state.shares_prompts:
            raise ValueError(f"{path}: prompts of this model are not shared")
        updates = [[pack(batch, rows, advantages, is_shared) for rows in parts] for parts in split]
        loop = BareLoop(path)
        first = worker.train(0, batch)
        flops = count_flops(lambda: loop.step(updates))
        found = Found([], [], [], [], sum(m.ids.numel() for u in updates for m in u), flops, 0.0)
        found.difference = max(abs(loop.last[name] / first[name] - 1) for name in loop.last)
        for number in range(rounds):
            sides = [lambda: ours(worker, batch, found), lambda: found.bare.append(timed(lambda: loop.step(updates)))]
            for side in sides if number % 2 else reversed(sides):
                side()
            found.gflops.append(max(map(sgemm_gflops, SGEMM)))
        return found


def split_as_ours(state: Any, batch: RolloutBatch, num_updates: int) -> list[list[list[int]]]:
    """Rows of every micro-batch of every update."""
    from slime_rl.trainer.shard import make_shard
    from slime_rl.trainer.token_pass import make_micro_batches

    shard, of = make_shard(state, batch), batch.dense("update_ids")
    rows = [(of == number).nonzero()[:, 0].tolist() for number in range(num_updates)]
    return [[micro.rows for micro in make_micro_batches(state, shard, part)] for part in rows]


def ours(worker: Any, batch: RolloutBatch, found: Found) -> None:
    start = time.perf_counter()
    metrics = worker.train(0, batch)
    found.ours.append(time.perf_counter() - start)
    found.inside.append(metrics["timing_s/train/forward_backward"] + metrics["timing_s/train/optimizer"])


def write_smollm2(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMOLLM2_135M)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="quickstart, smollm2-135m or a folder")
    parser.add_argument("--shape", choices=SHAPES, help="of the step; that of the model, or of smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape or (args.model if args.model in SHAPES else "smollm2-135m")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name if args.model in SHAPES else args.model)
        if args.model == "quickstart":
            write_model(folder, 1, Vocabulary())
        elif args.model == "smollm2-135m":
            write_smollm2(folder)
        from transformers import AutoConfig

        vocab_size = AutoConfig.from_pretrained(folder).vocab_size
        cases = {
            label: measure(folder, shape, vocab_size, is_shared, args.rounds, args.threads)
            for label, is_shared in (("prompts once", True), ("a prompt for each sample", False))
        }
    print_cases(cases)


def print_cases(cases: dict[str, Found]) -> None:
    print("| case | tokens | ours, s | its forward, backward, optimizer | bare, s | limit, s | ratio (of the rounds) |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for label, found in cases.items():
        ratios = [a / b for a, b in zip(found.ours, found.bare, strict=True)]
        columns = [statistics.median(x) for x in (found.ours, found.inside, found.bare)]
        shown = " | ".join(f"{value:.3f}" for value in (*columns, found.limit_s))
        print(f"| {label} | {found.tokens} | {shown} | {found.ratio:.3f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
    for label, found in cases.items():
        bare, whole = statistics.median(found.bare), statistics.median(found.ours)
        print(
            f"{label}: {found.flops / GIGA:.1f} GFLOP at {max(found.gflops):.0f} GFLOP/s; tokens/s: ours "
            f"{found.tokens / whole:.0f}, bare {found.tokens / bare:.0f}, limit {found.tokens / found.limit_s:.0f}; "
            f"loss and gradient norm of the first step differ by {found.difference:.1e}"
        )
    worst = max(cases.values(), key=lambda found: found.ratio)
    print(
        f"ours_s={statistics.median(worst.ours):.3f} bare_s={statistics.median(worst.bare):.3f} "
        f"limit_s={worst.limit_s:.3f} ratio={worst.ratio:.3f}"
    )


if __name__ == "__main__":
    main()
