"""Rotary position embeddings: what the checkpoint says, and the frequencies that transformers computes from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime_rl.trainer.families.fields import Fields

# Types whose frequencies do not depend on the length of the sequence, and the fields that each takes.
SUPPORTED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(["factor"]),
    "llama3": frozenset(["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    "yarn": frozenset(
        [
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "mscale",
            "mscale_all_dim",
        ]
    ),
}
_OF_ALL = frozenset(["rope_theta", "rope_type", "type", "partial_rotary_factor"])


def rope_parameters(f: Fields) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and what that type takes, from the places where transformers 4 and 5 keep it.

    Raises:
        ValueError: no base, a type that is not supported, or a field that is not one of that type.
    """
    f.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    found = dict(getattr(f.hf, "rope_parameters", None) or {})
    base = found.get("rope_theta") or f.raw.get("rope_theta")
    if base is None:
        raise ValueError(f"{f.path}/config.json: there is no rope_theta in a {f.model_type} model")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in SUPPORTED:
        raise ValueError(
            f"{f.path}/config.json: rope_type {kind!r} is not supported; {', '.join(SUPPORTED)} are (the others depend "
            "on the length of each sequence)"
        )
    for name, place in ((n, p) for p in ("rope_parameters", "rope_scaling") for n in f.raw.get(p) or {}):
        if name not in _OF_ALL | SUPPORTED[kind] and f.raw[place][name] is not None:
            raise ValueError(
                f"{f.path}/config.json: {place} has the field {name!r} = {f.raw[place][name]!r}, which is not known "
                f"for rope_type {kind!r} here; it may change what the model computes, so it is not ignored"
            )
    partial = found.get("partial_rotary_factor") or f.raw.get("partial_rotary_factor") or 1.0
    return found | {"rope_theta": base, "rope_type": kind, "partial_rotary_factor": partial}


def rotary_frequencies(f: Fields, head_dim: int) -> tuple[Tensor, float, float]:
    """(inverse frequencies `[rotated channels / 2]` float32, share of channels rotated, factor on cosine and sine)."""
    found = rope_parameters(f)
    share = float(found["partial_rotary_factor"])
    if found["rope_type"] == "default":
        width = int(head_dim * share)
        steps = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width  # in a meta context too
        return 1.0 / (found["rope_theta"] ** steps), share, 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[found["rope_type"]](f.hf, torch.device("cpu"))
    return frequencies, share, float(factor)
