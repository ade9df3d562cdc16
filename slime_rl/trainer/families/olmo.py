"""OLMo (norms without weights), OLMo 2 (norms after each part only, query-key norm over all heads), OLMoE."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from slime_rl.trainer.families.family import (
    LAYER,
    Family,
    Rules,
    decoder,
    expert_rules,
    experts,
    softmax_router,
    standard_rules,
)
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.modules import PlainLayerNorm, layer_specs, norm_outputs, norm_over_heads
from slime_rl.trainer.families.rules import Rows, Whole


def _no_bias_no_clip(f: Fields) -> None:
    f.must_be("attention_bias", False, default=False)
    f.must_be("clip_qkv", None)


def _olmo(f: Fields) -> dict[str, Any]:
    _no_bias_no_clip(f)
    f.ignore("rms_norm_eps")  # its norms have no field for it; 1e-5 stands in the code
    return decoder(f, layernorm_epsilon=1e-5, normalization="LayerNorm")


def _olmo_spec(f: Fields, spec: Any) -> None:
    for layer in layer_specs(spec):
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainLayerNorm
    spec.layer_norm = PlainLayerNorm


def _olmo2(f: Fields) -> dict[str, Any]:
    _no_bias_no_clip(f)
    return decoder(f, qk_layernorm=True)


def _olmo2_spec(f: Fields, spec: Any) -> None:
    norm_over_heads(f, spec)
    for layer in layer_specs(spec):
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    norm_outputs(f, spec)


def _normed_heads_rules(f: Fields) -> Rules:
    attention = LAYER + "self_attn."
    return standard_rules(f) | {
        "self_attention.q_layernorm.weight": Rows(attention + "q_norm.weight"),
        "self_attention.k_layernorm.weight": Rows(attention + "k_norm.weight"),
    }


def _olmo2_rules(f: Fields) -> Rules:
    return _normed_heads_rules(f) | {
        "self_attention.output_norm.weight": Whole(LAYER + "post_attention_layernorm.weight"),
        "mlp.output_norm.weight": Whole(LAYER + "post_feedforward_layernorm.weight"),
    }


def _olmoe(f: Fields) -> dict[str, Any]:
    _no_bias_no_clip(f)
    pattern = [1] * f("num_hidden_layers")
    moe = experts(f, count="num_experts", pattern=pattern, moe_ffn_hidden_size=f("intermediate_size"))
    return decoder(f, qk_layernorm=True) | moe | softmax_router(f)


def _olmoe_rules(f: Fields) -> Rules:
    return _normed_heads_rules(f) | expert_rules()


OLMO = Family("olmo", _olmo, standard_rules, adjust_spec=_olmo_spec)
OLMO2 = Family("olmo2", _olmo2, _olmo2_rules, adjust_spec=_olmo2_spec)
OLMOE = Family("olmoe", _olmoe, _olmoe_rules, adjust_spec=norm_over_heads)
