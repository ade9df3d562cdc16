"""Multi-head latent attention (DeepSeek-V2) on CPU: SGLang's torch_native backend knows the absorbed form only."""

from __future__ import annotations

import importlib
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any


def is_needed(model_path: str) -> bool:
    """Whether the model keeps a latent instead of keys and values."""
    path = Path(model_path) / "config.json"
    return path.is_file() and bool(json.loads(path.read_text()).get("kv_lora_rank"))


def install() -> None:
    """Prompts are computed in the absorbed form as responses are: their keys are read from the cache of latents.
    Positions that are not scaled get the plain rotary embedding, as on a GPU."""
    handlers = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    absorbed = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed)
    rotary = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")
    vars(rotary)["get_rope_cpu"] = partial(_rope, rotary.get_rope, rotary.get_rope_cpu)


def _rope(plain: Any, scaled: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(scaled).bind(*args, **kwargs)
    if given.arguments.get("rope_scaling") is not None:
        return scaled(*args, **kwargs)
    return plain(**{name: value for name, value in given.arguments.items() if name != "device"})
