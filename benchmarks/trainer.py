"""Log-prob and train passes against a plain transformers + AdamW loop on the same tokens, padded as TRL pads them.

    python benchmarks/trainer.py [--layers 30] [--sequences 16] [--threads 2]

The model has the shape of SmolLM2-135M and random weights, in float32; responses have lognormal lengths. The plain loop
takes --padded-batch sequences at a time in the order they come, prompts padded on the left and responses on the right
to the longest of those (TRL pads to the longest of the whole step, which is more), and computes logits for responses
only. Both keep the whole step's loss as one PPO update. Then: padding and imbalance of a larger batch over 4
data-parallel workers, and peak memory of log-probs at a vocabulary of 152k for growing T, each in a process of its own.

Last line: `ours_tokens_s=… padded_tokens_s=… ratio=… padding_waste=… dp_imbalance=…`, tokens that are no padding over
the seconds of both passes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.trainer_cases import make_config, open_worker
from slime_rl.data.batches import RolloutBatch, split_for_data_parallel
from slime_rl.data.packing import estimate_flops, pack
from slime_rl.data.ragged import Ragged

SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
LONGEST_RESPONSE = 384
LARGE_VOCAB = 151_936  # Qwen's
MEMORY_TOKENS = (512, 2048, 8192)
GROUP = 4
LR = 1e-6


def make_lognormal_batch(sequences: int, vocab_size: int, seed: int = 0) -> RolloutBatch:
    """Prompts of 16 to 48 tokens, responses of exp(N(log 64, 1)) up to 384."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(16, 49, (sequences,), generator=generator)
    responses = (64 * torch.randn(sequences, generator=generator).exp()).long().clamp(2, LONGEST_RESPONSE)
    rows = [torch.randint(0, vocab_size, (int(n),), generator=generator) for n in prompts + responses]
    tensors: dict[str, Any] = {
        "tokens": Ragged.from_list(rows, torch.int64),
        "prompt_lengths": prompts,
        "loss_mask": Ragged.from_list([torch.ones(int(n)) for n in responses], torch.float32),
        "rollout_log_probs": Ragged.from_list([torch.full((int(n),), -10.8) for n in responses], torch.float32),
        "weight_versions": Ragged.from_list([torch.zeros(int(n)) for n in responses], torch.int32),
        "rewards": torch.rand(sequences, generator=generator),
        "group_ids": torch.arange(sequences) // GROUP,
        "rollout_ids": torch.arange(sequences),
        "sample_ids": torch.arange(sequences),
        "truncated": torch.zeros(sequences, dtype=torch.bool),
        "update_ids": torch.zeros(sequences, dtype=torch.int64),
    }
    return RolloutBatch(tensors, None, {"step": 0, "weight_version": 0, "num_samples": sequences})


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def time_ours(path: Path, batch: RolloutBatch, threads: int, warm_up: RolloutBatch) -> tuple[float, float, float]:
    """(seconds of the log-prob pass, seconds of the train step, share of padding)."""
    flags = ["--train-threads-per-worker", str(threads), "--max-tokens-per-worker", "1024", "--lr", str(LR)]
    config = make_config(path, *flags, "--old-log-probs", "rollout", groups=len(batch) // GROUP, samples=GROUP)
    with open_worker(config) as worker:
        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.token_pass import make_micro_batches

        micro_batches = make_micro_batches(worker.state, make_shard(worker.state, batch), list(range(len(batch))))
        passed = sum(micro.input_ids.numel() for micro in micro_batches)
        waste = max(0.0, passed / int(batch.total_lengths.sum()) - 1)  # below: last tokens are not passed
        worker.train(0, warm_up)  # allocates the optimizer's state
        return timed(lambda: worker.compute_log_probs(batch)), timed(lambda: worker.train(0, batch)), waste


class PaddedLoop:
    """What one writes without a framework: padded micro-batches, transformers, AdamW."""

    def __init__(self, path: Path, micro_batch: int) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.micro_batch = micro_batch

    def log_probs(self, batch: RolloutBatch, rows: range) -> tuple[Tensor, Tensor]:
        """Log-probs and mask `[n, longest response]` of the given rows."""
        tokens, prompts = batch.ragged("tokens"), batch.dense("prompt_lengths").tolist()
        longest_prompt = max(prompts[row] for row in rows)
        longest = max(len(tokens[row]) - prompts[row] for row in rows)
        ids = torch.zeros(len(rows), longest_prompt + longest, dtype=torch.int64)
        attended, mask = torch.zeros_like(ids), torch.zeros(len(rows), longest)
        for i, row in enumerate(rows):
            start, size = longest_prompt - prompts[row], len(tokens[row])
            ids[i, start : start + size], attended[i, start : start + size] = tokens[row], 1
            mask[i, : size - prompts[row]] = 1
        positions = (attended.cumsum(-1) - 1).clamp(min=0)
        output = self.model(
            input_ids=ids, attention_mask=attended, position_ids=positions, logits_to_keep=longest + 1, use_cache=False
        )
        logits = output.logits[:, :-1]
        picked = logits.gather(-1, ids[:, longest_prompt:, None])[..., 0]
        return picked - logits.logsumexp(-1), mask

    def micro_batches(self, batch: RolloutBatch) -> list[range]:
        return [range(i, min(i + self.micro_batch, len(batch))) for i in range(0, len(batch), self.micro_batch)]

    def padded_tokens(self, batch: RolloutBatch) -> int:
        total, prompts = batch.total_lengths, batch.dense("prompt_lengths")
        padded = 0
        for rows in self.micro_batches(batch):
            part = slice(rows.start, rows.stop)
            padded += len(rows) * int(prompts[part].max() + (total - prompts)[part].max())
        return padded

    def score(self, batch: RolloutBatch) -> None:
        with torch.no_grad():
            for rows in self.micro_batches(batch):
                self.log_probs(batch, rows)

    def train(self, batch: RolloutBatch) -> None:
        count = float(batch.response_lengths.sum())
        rewards = batch.dense("rewards")
        self.optimizer.zero_grad()
        for rows in self.micro_batches(batch):
            log_probs, mask = self.log_probs(batch, rows)
            ratio = (log_probs - log_probs.detach()).exp()
            advantages = (rewards[rows.start : rows.stop] - rewards.mean())[:, None]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            ((loss * mask).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def balance(sequences: int = 256, workers: int = 4, cap: int = 8192) -> tuple[float, float]:
    """(imbalance of the work of data-parallel workers, imbalance of a worker's micro-batches), of a larger batch.

    Work is the estimated FLOPs at hidden size 576; the imbalance is the largest over the mean, minus 1.
    """
    hidden = SMOLLM2_135M["hidden_size"]
    batch = make_lognormal_batch(sequences, 100, seed=1)
    shards = split_for_data_parallel(batch, workers, hidden_size=hidden)
    work = [sum(estimate_flops(n, hidden) for n in shard.total_lengths.tolist()) for shard in shards]
    lengths = shards[0].total_lengths.tolist()
    parts = pack(lengths, cap, hidden_size=hidden)
    parts_work = [sum(estimate_flops(lengths[i], hidden) for i in part) for part in parts]
    return tuple(max(w) / (sum(w) / len(w)) - 1 for w in (work, parts_work))  # type: ignore[return-value]


def memory_of_head(tokens: int) -> float:
    """MiB by which forward and backward of the head raise the peak of this process."""
    from slime_rl.trainer.head import head_spec, log_probs_and_entropy

    def peak() -> float:  # not getrusage: its maximum survives exec, so it would be that of the parent
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    hidden = torch.randn(tokens, 64, requires_grad=True)
    weight = torch.randn(LARGE_VOCAB, 64, requires_grad=True)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    targets = torch.randint(0, LARGE_VOCAB, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = peak()
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, head_spec(None, 0, 1, LARGE_VOCAB, 1.0))
    (log_probs.mean() + entropy.mean()).backward()
    return peak() - before


def print_memory() -> None:
    print(f"\npeak memory of log-probs and entropy, forward and backward, vocabulary {LARGE_VOCAB}:")
    for tokens in MEMORY_TOKENS:
        command = [sys.executable, __file__, "--memory-of", str(tokens)]
        used = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        whole = tokens * LARGE_VOCAB * 4 / 2**20
        print(f"  T = {tokens:>5}: {used:6.0f} MiB (all logits in float32: {whole:.0f} MiB)")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M["num_hidden_layers"])
    parser.add_argument("--sequences", type=int, default=16, help=f"a multiple of {GROUP}")
    parser.add_argument("--padded-batch", type=int, default=8, help="sequences of the plain loop's micro-batches")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    return parser


def compare(arguments: argparse.Namespace) -> str:
    import transformers

    shape = SMOLLM2_135M | {"num_hidden_layers": arguments.layers}
    batch = make_lognormal_batch(arguments.sequences, shape["vocab_size"])
    warm_up = make_lognormal_batch(GROUP, shape["vocab_size"], seed=3)
    tokens = int(batch.total_lengths.sum())
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape))
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, {tokens} tokens", flush=True)
        model.save_pretrained(folder)
        del model
        ours_score, ours_train, waste = time_ours(Path(folder), batch, arguments.threads, warm_up)
        loop = PaddedLoop(Path(folder), arguments.padded_batch)
    loop.train(warm_up)
    padded_score, padded_train = timed(lambda: loop.score(batch)), timed(lambda: loop.train(batch))
    padded = loop.padded_tokens(batch)
    print("| pass | ours, tokens/s | padded loop, tokens/s | ratio |\n|---|---|---|---|")
    for name, a, b in (("log-probs", ours_score, padded_score), ("train", ours_train, padded_train)):
        print(f"| {name} | {tokens / a:.0f} | {tokens / b:.0f} | {b / a:.2f} |")
    print(f"padded loop: {padded} tokens for {tokens}, {padded / tokens - 1:.0%} padding")
    imbalance, between_micro_batches = balance()
    print(f"256 sequences on 4 workers: largest micro-batch {between_micro_batches:.1%} over the mean of its worker")
    ours, theirs = tokens / (ours_score + ours_train), tokens / (padded_score + padded_train)
    return (
        f"ours_tokens_s={ours:.1f} padded_tokens_s={theirs:.1f} ratio={ours / theirs:.2f} "
        f"padding_waste={waste:.4f} dp_imbalance={imbalance:.4f}"
    )


def main() -> None:
    arguments = make_parser().parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of is not None:
        print(memory_of_head(arguments.memory_of))
        return
    last = compare(arguments)
    print_memory()
    print(last)


if __name__ == "__main__":
    main()
