"""GLM-4 (norms on both sides of each part, interleaved half rotary) and GLM-4.5 (experts behind DeepSeek's router)."""

from __future__ import annotations

from typing import Any

from slime_rl.trainer.families.family import (
    LAYER,
    Family,
    Rules,
    decoder,
    deepseek_experts,
    expert_rules,
    standard_rules,
)
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.modules import norm_outputs
from slime_rl.trainer.families.rules import StackedInOne, Whole


def _glm4(f: Fields) -> dict[str, Any]:
    return decoder(f, rotates_part=True, add_qkv_bias=bool(f("attention_bias")), rotary_interleaved=True)


def _glm4_rules(f: Fields) -> Rules:
    return standard_rules(f) | {
        "self_attention.output_norm.weight": Whole(LAYER + "post_self_attn_layernorm.weight"),
        "mlp.linear_fc1.weight": StackedInOne(LAYER + "mlp.gate_up_proj.weight"),
        "mlp.output_norm.weight": Whole(LAYER + "post_mlp_layernorm.weight"),
    }


def _glm4_moe(f: Fields) -> dict[str, Any]:
    biases, norms = bool(f("attention_bias")), bool(f("use_qk_norm"))
    attention = decoder(f, rotates_part=True, add_qkv_bias=biases, qk_layernorm=norms)
    return attention | deepseek_experts(f)


def _glm4_moe_rules(f: Fields) -> Rules:
    return standard_rules(f) | expert_rules()


GLM4 = Family("glm4", _glm4, _glm4_rules, adjust_spec=norm_outputs)
GLM4_MOE = Family("glm4_moe", _glm4_moe, _glm4_moe_rules, has_extra_layers=True)
