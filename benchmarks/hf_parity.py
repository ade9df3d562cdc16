"""Log-probs of the trainer against transformers in float32, packed and one sequence at a time.

    python benchmarks/hf_parity.py [MODEL_DIR]

Without MODEL_DIR: a random model of every family (benchmarks/tiny_models.py). Also checks that Hugging Face -> Megatron
-> Hugging Face gives every weight back bit by bit. Prints a table and, last, `models=… max_abs_logprob_diff=…`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tiny_models import CATALOGUE, make_named
from benchmarks.trainer_cases import make_batch, make_config, open_worker
from slime_rl.data.batches import RolloutBatch
from slime_rl.trainer.hf_folder import HFFolder


def hf_log_probs(model: Any, batch: RolloutBatch) -> torch.Tensor:
    """Response log-probs by transformers, one unpadded sequence at a time."""
    rows = []
    for tokens, prompt in zip(batch.ragged("tokens").rows(), batch.dense("prompt_lengths").tolist(), strict=True):
        with torch.no_grad():
            log_p = model(tokens[None]).logits[0].float().log_softmax(-1)
        rows.append(log_p[:-1].gather(-1, tokens[1:, None])[prompt - 1 :, 0])
    return torch.cat(rows)


def compare(path: Path) -> tuple[float, float, bool]:
    """(largest difference packed, unpacked, whether every weight comes back bit by bit) of one checkpoint."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = make_batch()
    want = hf_log_probs(model, batch)
    gaps = []
    for flags in (("--max-tokens-per-worker", "4096"), ("--micro-batch-size", "1")):
        with open_worker(make_config(path, *flags)) as worker:
            gaps.append(float((worker.compute_log_probs(batch) - want).abs().max()))
            if len(gaps) == 2:
                with tempfile.TemporaryDirectory() as folder:
                    worker.save_hf(Path(folder) / "hf")
                    same = same_weights(path, Path(folder) / "hf")
    return gaps[0], gaps[1], same


def same_weights(original: Path, exported: Path) -> bool:
    """Whether the two folders hold the same weights, bit by bit (in the type of the exported ones)."""
    ours, theirs = HFFolder(exported), HFFolder(original)
    missing = set(theirs.names) - set(ours.names)
    if not set(ours.names) <= set(theirs.names) or not missing <= {"lm_head.weight"}:  # a tied model may store it twice
        return False
    for name in ours.names:
        tensor = ours.tensor(name)
        if not torch.equal(tensor, theirs.tensor(name).to(tensor.dtype)):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path, help="a Hugging Face folder instead of the random models")
    chosen = parser.parse_args().model_dir
    warnings.filterwarnings("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if chosen is not None:
            rows.append((chosen.name, *compare(chosen)))
        else:
            for i, name in enumerate(CATALOGUE):
                path = Path(folder) / str(i)
                make_named(path, name)
                rows.append((name, *compare(path)))
    print("| model | packed | unpacked | weights come back bitwise |")
    print("|---|---|---|---|")
    for name, packed, unpacked, bitwise in rows:
        print(f"| {name} | {packed:.1e} | {unpacked:.1e} | {'yes' if bitwise else 'NO'} |")
    worst = max(max(packed, unpacked) for _, packed, unpacked, _ in rows)
    if not all(row[3] for row in rows):
        sys.exit("a weight did not come back as it was")
    print(f"models={len(rows)} max_abs_logprob_diff={worst:.1e}")


if __name__ == "__main__":
    main()
