"""Small real objects for tests, built the way a run builds them."""

from __future__ import annotations

import json
from pathlib import Path

from slime_rl.config import Config, parse_config

# The smallest Llama that every part accepts: two layers, grouped key-value heads, no two equal widths.
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_model_folder(folder: Path, **overrides: object) -> Path:
    """A checkpoint folder with nothing but `config.json` (no weights, no tokenizer); `overrides` change its keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **overrides}))
    return folder


def write_prompts(path: Path, num_rows: int = 3) -> Path:
    """A jsonl file of additions: `{"prompt": "0+1=", "label": "1"}` and so on."""
    rows = [{"prompt": f"{i}+{i + 1}=", "label": str(2 * i + 1)} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(tmp_path: Path, *flags: str) -> Config:
    """A whole Config from command-line flags; model, prompts and run folder default to small ones in `tmp_path`.

    Example: `make_config(tmp_path, "--policy-loss", "gspo", "--rollout-batch-size", "4")`.
    """
    model = write_model_folder(tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    defaults = ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--run-dir", str(tmp_path / "run")]
    return parse_config([*defaults, *flags])
