"""A Hugging Face folder small enough to serve in a test: a random Qwen3 with a character tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = [chr(code) for code in range(32, 127)]


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Config, float32 weights drawn from `seed`, and tokenizer; `overrides` change the config."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,  # large, so that other weights give clearly other log-probs
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def quantize_checkpoint(folder: Path, rows: int = 128, columns: int = 128, **changes: Any) -> Path:
    """Rewrite a checkpoint of one file in the form of Qwen3's "-FP8": every projection as fp8 in blocks. `changes` are
    to quantization_config; what its modules_to_not_convert lists stays as it is."""
    import json

    from safetensors.torch import load_file, save_file

    from slime_rl.config.quantization import read_quantization
    from slime_rl.data.fp8 import quantize_blocks

    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form | changes}
    (folder / "config.json").write_text(json.dumps(config))
    blocks, stored = read_quantization(folder), {}
    assert blocks is not None
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        if name.endswith("_proj.weight") and not blocks.ignores(name):
            q, scale = quantize_blocks(weight, rows, columns, power_of_two=blocks.power_of_two)
            stored |= {name: q, name + "_scale_inv": scale}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
