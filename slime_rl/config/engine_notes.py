"""Fields of config.json that the installed SGLang reads over, so that its samples come from another model.

Found by `benchmarks/logprob_gap.py --families` with SGLang 0.5.23; docs/models.md has the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_rl.config.config import Config


def engine_notes(config: Config) -> list[str]:
    """One sentence for each field of the policy's config.json that the trainer computes and SGLang does not."""
    if not config.needs_engines:
        return []
    raw: dict[str, Any] = json.loads((Path(config.model.hf_checkpoint) / "config.json").read_text())
    return [
        f"{config.model.hf_checkpoint}/config.json: SGLang takes no notice of {field}; its samples come from another "
        "model than the one that is trained (train/logprob_diff_mean_abs says how far)"
        for field in _read_over(raw, config.sampling.max_prompt_len + config.sampling.max_response_len)
    ]


def _read_over(raw: dict[str, Any], num_tokens: int) -> list[str]:
    kind = raw.get("model_type")
    window, heads = raw.get("sliding_window"), raw.get("num_attention_heads")
    hidden, width = raw.get("hidden_size"), raw.get("head_dim")
    rules = [
        (kind == "llama" and raw.get("mlp_bias"), "mlp_bias"),
        (kind in ("mistral", "mixtral") and window and window < num_tokens, f"sliding_window = {window}"),
        (kind == "mixtral" and width and heads and hidden and width * heads != hidden, f"head_dim = {width}"),
        (kind == "olmo" and raw.get("num_key_value_heads", heads) != heads, "num_key_value_heads"),
        (kind == "qwen3_moe" and raw.get("mlp_only_layers"), f"mlp_only_layers = {raw.get('mlp_only_layers')}"),
        (kind == "qwen3_moe" and raw.get("decoder_sparse_step", 1) != 1, "decoder_sparse_step"),
    ]
    return [field for holds, field in rules if holds]
