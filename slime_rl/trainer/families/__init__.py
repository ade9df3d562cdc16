"""Families of models that are converted and built here: `model_type` of config.json -> where its `Family` is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_rl.trainer.families.family import Family

FAMILIES = {
    "deepseek_v3": "deepseek:DEEPSEEK_V3",
    "gemma": "gemma:GEMMA",
    "glm4": "glm:GLM4",
    "glm4_moe": "glm:GLM4_MOE",
    "kimi_k2": "deepseek:DEEPSEEK_V3",
    "llama": "llama:LLAMA",
    "mistral": "llama:MISTRAL",
    "mixtral": "mixtral:MIXTRAL",
    "olmo": "olmo:OLMO",
    "olmo2": "olmo:OLMO2",
    "olmoe": "olmo:OLMOE",
    "qwen2": "qwen:QWEN2",
    "qwen2_moe": "qwen:QWEN2_MOE",
    "qwen3": "qwen:QWEN3",
    "qwen3_moe": "qwen:QWEN3_MOE",
    "smollm3": "smollm3:SMOLLM3",
}


def find_family(model_type: str) -> Family | None:
    """The family of a model type; None when there is none here."""
    place = FAMILIES.get(model_type)
    if place is None:
        return None
    module, name = place.split(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
