"""Rotary position embeddings: what the checkpoint says, as arguments of Megatron's GPTModel."""

from __future__ import annotations

from typing import Any

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_arguments(hf_config: Any) -> dict[str, Any]:
    """`rotary_base` and scaling for GPTModel.

    Raises:
        ValueError: a kind of scaling that Megatron would compute differently; training would go on silently wrong.
    """
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    base = parameters.get("rope_theta") or getattr(hf_config, "rope_theta", None)
    if base is None:
        raise ValueError(f"the checkpoint's config.json ({hf_config.model_type}) has no rope_theta")
    arguments: dict[str, Any] = {"rotary_base": base}
    partial = parameters.get("partial_rotary_factor") or getattr(hf_config, "partial_rotary_factor", None)
    if partial is not None and partial != 1.0:
        arguments["rotary_percent"] = partial
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = parameters["factor"]
    elif kind == "llama3":
        other = {name: parameters.get(name) for name, value in LLAMA3.items() if parameters.get(name) != value}
        if other:
            raise ValueError(f"rope_type llama3: Megatron computes it with {LLAMA3}, the checkpoint has {other}")
        arguments |= {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}
    elif kind != "default":
        raise ValueError(f"rope_type {kind!r} of the checkpoint is not supported; default, linear and llama3 are")
    return arguments
