"""Llama 2 and 3, SmolLM and SmolLM2, and what else calls itself a Llama; Mistral is a Llama with windowed attention."""

from __future__ import annotations

from typing import Any

from slime_rl.trainer.families.family import Family, biases, decoder, standard_rules
from slime_rl.trainer.families.fields import Fields


def _llama(f: Fields) -> dict[str, Any]:
    f.ignore("is_llama_config", "rope_interleaved")  # written by conversion scripts; rotary rows are Hugging Face's
    return decoder(f, **biases(f))


def _mistral(f: Fields) -> dict[str, Any]:
    return decoder(f, **window(f))


def window(f: Fields) -> dict[str, Any]:
    """Attention to the last `sliding_window` tokens, the query's own included."""
    width = f("sliding_window", None)
    if width is not None and width < 1:
        raise ValueError(f"{f.path}/config.json: sliding_window must be > 0 or null, got {width}")
    return {} if width is None else {"window_size": (width - 1, 0)}


LLAMA = Family("llama", _llama, standard_rules)
MISTRAL = Family("mistral", _mistral, standard_rules)
