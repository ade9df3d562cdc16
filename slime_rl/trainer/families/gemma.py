"""Gemma (the first): weights of norms counted from 1, tanh GELU, embeddings scaled by the root of the hidden size.

Gemma 2 and 3 are not here: soft caps on logits, and two rotary bases that take turns, are not in Megatron's attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from slime_rl.trainer.families.family import Family, decoder, standard_rules
from slime_rl.trainer.families.fields import Fields


def _gemma(f: Fields) -> dict[str, Any]:
    f.must_be("hidden_act", "gelu_pytorch_tanh")  # "gelu" of the first release was meant to be this
    f.must_be("hidden_activation", None, "gelu_pytorch_tanh")
    f.must_be("attention_bias", False, default=False)
    f.must_be("use_bidirectional_attention", None, False)
    activation = partial(F.gelu, approximate="tanh")
    return decoder(f, activation_func=activation, layernorm_zero_centered_gamma=True)


def _scale_embedding(f: Fields, model: Any) -> None:
    """As transformers does it: the factor is rounded to the type of the activations."""
    if not model.pre_process:
        return
    factor = f("hidden_size") ** 0.5

    def scale(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.tensor(factor, dtype=output.dtype, device=output.device)

    model.embedding.register_forward_hook(scale)


GEMMA = Family("gemma", _gemma, standard_rules, finish=_scale_embedding)
