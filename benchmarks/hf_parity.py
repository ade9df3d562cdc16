"""Log-probs of the trainer against transformers in float32, packed and one sequence at a time.

    python benchmarks/hf_parity.py [MODEL_DIR]

Without MODEL_DIR: random Llama, Qwen2.5, Qwen3 (tied and untied), Qwen3-MoE and DeepSeek-V3 (MLA and experts). Also
checks that Hugging Face -> Megatron -> Hugging Face gives every weight back bit by bit. Prints a Markdown table and,
last, `models=… max_abs_logprob_diff=…`.
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

from benchmarks.trainer_cases import free_ports, make_batch, make_checkpoint, make_config
from slime_rl.data.batches import RolloutBatch
from slime_rl.trainer.worker import TrainWorker

RANDOM_MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama", "llama", {}),
    ("Qwen2.5 (biases)", "qwen2", {}),
    ("Qwen3 (query-key norm)", "qwen3", {}),
    ("Qwen3, tied embeddings", "qwen3", {"tie_word_embeddings": True}),
    ("Qwen3-MoE", "qwen3_moe", {}),
    ("DeepSeek-V3 (MLA, MoE)", "deepseek_v3", {}),
]


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
    exported: dict[str, torch.Tensor] = {}
    for flags in (("--max-tokens-per-worker", "4096"), ("--micro-batch-size", "1")):
        worker = TrainWorker(make_config(path, *flags), 0, 1, "127.0.0.1", free_ports(1)[0])
        gaps.append(float((worker.compute_log_probs(batch) - want).abs().max()))
        exported = dict(worker.export_weights())
        worker.shutdown()
    return gaps[0], gaps[1], same_weights(path, exported)


def same_weights(path: Path, exported: dict[str, torch.Tensor]) -> bool:
    from safetensors import safe_open

    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                names.add(name)
                tensor = opened.get_tensor(name)
                if name in exported and not torch.equal(exported[name], tensor.to(exported[name].dtype)):
                    return False
    missing = names - exported.keys()
    return exported.keys() <= names and missing <= {"lm_head.weight"}  # a tied model may store it twice


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
            for i, (name, kind, overrides) in enumerate(RANDOM_MODELS):
                path = Path(folder) / str(i)
                make_checkpoint(path, kind, **overrides)
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
