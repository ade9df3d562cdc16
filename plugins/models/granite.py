"""Granite, a family that the core does not know: a Llama with four multipliers that Megatron does not have.

--model-conversion-path plugins.models.granite:GraniteConversion    configuration and weights
--model-provider-path   plugins.models.granite:build                the multipliers, as hooks on Megatron's modules

h = e · embedding(x)    h += r · attention(norm(h), scale a)    h += r · mlp(norm(h))    logits = head(norm(h)) / s
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slime_rl.config import Config
from slime_rl.trainer.conversion import FamilyConversion
from slime_rl.trainer.families.family import Family, biases, decoder, standard_rules
from slime_rl.trainer.families.fields import Fields


def transformer(f: Fields) -> dict[str, Any]:
    """Megatron's configuration. Reading a field says that it is understood; any other in config.json is refused."""
    f.ignore("embedding_multiplier", "residual_multiplier", "logits_scaling")  # `build` applies them
    return decoder(f, softmax_scale=f("attention_multiplier"), **biases(f))


class GraniteConversion(FamilyConversion):
    """Configuration and weights; the names are Llama's."""

    family = Family("granite", transformer, standard_rules)

    def __init__(self, config: Config, hf_path: str) -> None:
        if config.model.model_provider_path is None:
            raise ValueError("Granite needs --model-provider-path plugins.models.granite:build for its multipliers")
        super().__init__(config, hf_path)


def build(config: Config, transformer_config: Any, pre_process: bool, post_process: bool) -> Any:
    """The GPTModel of one pipeline stage, with the multipliers."""
    conversion = GraniteConversion(config, config.model.hf_checkpoint)
    f, model = conversion.fields, conversion.architecture.build(pre_process, post_process, None)
    if pre_process:
        _scale(model.embedding, f("embedding_multiplier"))
    for layer in model.decoder.layers:
        _scale(layer.self_attention, f("residual_multiplier"))
        _scale(layer.mlp, f("residual_multiplier"))
    if post_process:
        _scale(model.decoder.final_layernorm, 1 / f("logits_scaling"))  # the head is linear
    return model


def _scale(module: Any, factor: float) -> None:
    """Multiply what a module returns: a tensor, or a tensor and a bias (None here)."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        return output * factor if isinstance(output, Tensor) else (output[0] * factor, *output[1:])

    module.register_forward_hook(hook)
