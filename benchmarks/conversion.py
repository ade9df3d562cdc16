"""Conversions of every family, and of real models: bit by bit, against transformers, and how fast.

    python benchmarks/conversion.py [MODEL_DIR ...] [--skip-random] [--workers N]

For a random model of every family (benchmarks/tiny_models.py) and for each MODEL_DIR:
  * every weight comes back bitwise: Hugging Face -> Megatron -> Hugging Face, and Hugging Face -> torch_dist and back;
  * log-probs of the trainer and of transformers, both in float32;
  * MODEL_DIR only: 10 greedy tokens are those of transformers; time of both conversions against `cp` of the weights
    and `sync` of the copy (the conversions flush to disk too; the source is in the page cache), and peak memory.
Without MODEL_DIR the speed is that of a random Llama of about 400 MB. Last line:
`families=… bitwise=… max_abs_logprob_diff=… share_of_cp=…`, the share being that of the slower direction.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.hf_parity import compare, same_weights
from benchmarks.tiny_models import CATALOGUE, make_named
from benchmarks.trainer_cases import make_config, only_worker
from slime_rl.config.model_folder import weight_files
from slime_rl.trainer.convert import conversion_config, hf_to_torch_dist, torch_dist_to_hf

NUM_GREEDY = 10
PROMPT = "The capital of France is"
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16000,
}


@dataclass
class Result:
    """What was seen of one model."""

    name: str
    gap: float
    bitwise: bool
    greedy: bool | None = None
    share: float | None = None


def round_trip(path: Path, folder: Path, workers: int) -> tuple[bool, float, float]:
    """(whether every weight comes back through torch_dist, seconds there, seconds back)."""
    start = time.perf_counter()
    hf_to_torch_dist(conversion_config(path, "families", False), folder / "dist", workers)
    there = time.perf_counter() - start
    config = conversion_config(path, "families", False)
    start = time.perf_counter()
    torch_dist_to_hf(
        config, folder / "dist" / "model", folder / "hf", num_workers=workers, dtype=None, shard_bytes=5 * 10**9
    )
    back = time.perf_counter() - start
    return same_weights(path, folder / "hf"), there, back


def copy_seconds(path: Path, folder: Path) -> tuple[float, float]:
    """Seconds of `cp` for the weight files, which are read once before; and with flushing the copy to disk."""
    files = weight_files(path)
    for file in files:
        file.read_bytes()
    (folder / "cp").mkdir()
    start = time.perf_counter()
    subprocess.run(["cp", *map(str, files), str(folder / "cp")], check=True)
    plain = time.perf_counter() - start
    subprocess.run(["sync", *(str(folder / "cp" / file.name) for file in files)], check=True)
    flushed = time.perf_counter() - start
    shutil.rmtree(folder / "cp")
    return plain, flushed


def measure_speed(path: Path, folder: Path, workers: int) -> tuple[bool, float]:
    """(bitwise, share of the speed of cp and sync in the slower direction); prints what it saw. Best of two."""
    num_bytes = sum(file.stat().st_size for file in weight_files(path))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, same = [], True
    for i in range(2):
        (folder / str(i)).mkdir(parents=True)
        plain, copied = copy_seconds(path, folder / str(i))
        ok, there, back = round_trip(path, folder / str(i), workers)
        times.append((plain, copied, there, back))
        same = same and ok
        shutil.rmtree(folder / str(i))
    plain, copied, there, back = (min(column) for column in zip(*times, strict=True))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{path.name}: {num_bytes / 1e6:.0f} MB: cp {plain:.2f} s, cp and sync {copied:.2f} s, "
        f"to torch_dist {there:.2f} s, to Hugging Face {back:.2f} s, "
        f"peak memory grew by {grown / 1024:.0f} MiB (mapped weight files included)",
        flush=True,
    )
    return same, copied / max(there, back)


def same_greedy_tokens(path: Path) -> bool:
    """Whether Megatron's ten most likely next tokens, one after the other, are those that transformers generates."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    want = model.generate(prompt, max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY, do_sample=False)[0]
    worker = only_worker(make_config(path))
    from slime_rl.trainer.model import output_weight, unwrap

    model_chunk, ids = unwrap(worker.state.models[0]), prompt
    with torch.no_grad():
        for _ in range(NUM_GREEDY):
            positions = torch.arange(ids.size(1))[None]
            hidden = model_chunk(ids, positions, None)  # [t, 1, H]: the output layer is deferred
            token = (hidden[-1] @ output_weight(model_chunk).T)[:, : len(tokenizer)].argmax(-1)
            ids = torch.cat([ids, token[None]], dim=1)
    worker.shutdown()
    print(f"{path.name}: {tokenizer.decode(ids[0])!r}", flush=True)
    return torch.equal(ids[0], want)


def check(name: str, path: Path, folder: Path, workers: int, is_real: bool) -> Result:
    """Everything that is said of one model."""
    packed, unpacked, exported = compare(path)
    if is_real:
        same, share = measure_speed(path, folder, workers)
        return Result(name, max(packed, unpacked), exported and same, same_greedy_tokens(path), share)
    same, _, _ = round_trip(path, folder, workers)
    return Result(name, max(packed, unpacked), exported and same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dirs", nargs="*", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--skip-random", action="store_true", help="only the models given")
    parser.add_argument("--workers", type=int, default=2, help="--num-workers of a conversion")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for i, name in enumerate([] if args.skip_random else CATALOGUE):
            make_named(folder / str(i), name)
            results.append(check(name, folder / str(i), folder / f"{i}-trip", 1, is_real=False))
        for path in args.model_dirs:
            results.append(check(path.name, path, folder / "real", args.workers, is_real=True))
        shares = [result.share for result in results if result.share is not None]
        if not shares:
            from benchmarks.tiny_models import make_checkpoint

            make_checkpoint(folder / "large", "llama", **LARGE)
            same, share = measure_speed(folder / "large", folder / "speed", args.workers)
            results.append(Result("random Llama of 400 MB", 0.0, same))
            shares = [share]
    print("| model | largest log-prob difference | bitwise | greedy tokens equal |")
    print("|---|---|---|---|")
    for result in results:
        greedy = "" if result.greedy is None else "yes" if result.greedy else "NO"
        print(f"| {result.name} | {result.gap:.1e} | {'yes' if result.bitwise else 'NO'} | {greedy} |")
    worst, bitwise = max(result.gap for result in results), sum(result.bitwise for result in results)
    print(f"families={len(results)} bitwise={bitwise} max_abs_logprob_diff={worst:.1e} share_of_cp={min(shares):.2f}")
    return 0 if bitwise == len(results) and all(result.greedy is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
