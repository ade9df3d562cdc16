"""Extension points of the trainer."""

from __future__ import annotations

import inspect
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import ModelConversion, ModelProvider
from slime_rl.registry import ExtensionPoint, own_code

MODEL_CONVERSION = ExtensionPoint(
    "--model-conversion-path",
    ModelConversion,
    {
        "families": "slime_rl.trainer.conversion:FamilyConversion",
        "mbridge": "slime_rl.trainer.bridge:MbridgeConversion",
    },
)
MODEL_PROVIDER = ExtensionPoint("--model-provider-path", ModelProvider, {})


def load_conversion(path: str) -> type[Any]:
    """The class of --model-conversion-path.

    Raises:
        ValueError: it cannot be imported, is no class, or is not made as `cls(config, hf_path)`.
    """
    kind = MODEL_CONVERSION.load(path)
    flag = MODEL_CONVERSION.flag
    if not inspect.isclass(kind):
        raise ValueError(f"{flag}: {path!r} must be a class that is made as (config, hf_path)")
    try:
        inspect.signature(kind).bind(object(), object())
    except TypeError as error:
        made = inspect.signature(kind)
        raise ValueError(f"{flag}: {path!r} takes {made}, but it is made as (config, hf_path): {error}") from None
    return kind


def open_conversion(config: Config, hf_path: str) -> Any:
    """The weight conversion of a model.

    Raises:
        ValueError: what the class says of the model, or raises, with flag and line; it has no `architecture`.
    """
    path = config.model.model_conversion_path
    kind = load_conversion(path)
    with own_code(MODEL_CONVERSION.flag, explained=(ValueError,)):
        conversion = kind(config, hf_path)
    if not hasattr(conversion, "architecture"):
        raise ValueError(
            f"{MODEL_CONVERSION.flag}: {path!r} must have the attribute `architecture` "
            "(slime_rl/trainer/architecture.py)"
        )
    return conversion


def build_stage(config: Config, architecture: Any, first: bool, last: bool, vp_stage: int | None) -> Any:
    """The GPTModel of a pipeline stage, by --model-provider-path where that is given.

    Raises:
        ValueError: what the function raises, with flag and line, or that it gives no model.
    """
    path = config.model.model_provider_path
    if path is None:
        return architecture.build(first, last, vp_stage)
    if vp_stage is not None:
        raise ValueError("--model-provider-path does not go with --megatron-virtual-pipeline-model-parallel-size")
    provider = MODEL_PROVIDER.load(path)
    with own_code(MODEL_PROVIDER.flag):
        model = provider(config, architecture.config, first, last)
    if not hasattr(model, "sharded_state_dict"):
        raise ValueError(f"{MODEL_PROVIDER.flag}: {path!r} must return Megatron's GPTModel, got {type(model).__name__}")
    return model
