"""DeepSeek-V3, Kimi-K2 and Moonlight: latent attention (MLA), grouped sigmoid router, a multi-token-prediction layer.

The extra layer for predicting a second token is neither trained nor used by the engines; it is carried along, so that
an exported folder has it (see conversion.py).
"""

from __future__ import annotations

from typing import Any

from slime_rl.trainer.families.family import (
    LAYER,
    Family,
    Rules,
    decoder,
    deepseek_experts,
    expert_rules,
    gated_mlp,
    outer_rules,
)
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.rules import Columns, Rows, Whole
from slime_rl.trainer.rope import rope_parameters


def _deepseek_v3(f: Fields) -> dict[str, Any]:
    f.must_be("attention_bias", False, default=False)
    f.must_be("rope_interleave", True, default=True)
    f.must_be("moe_layer_freq", 1, default=1)
    f.must_be("num_key_value_heads", f("num_attention_heads"), None)
    f.ignore("head_dim", "qk_head_dim")
    attention = {
        "multi_latent_attention": True,
        "num_query_groups": f("num_attention_heads"),
        "qk_layernorm": True,
        "q_lora_rank": f("q_lora_rank"),
        "kv_lora_rank": f("kv_lora_rank"),
        "qk_head_dim": f("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": f("qk_rope_head_dim"),
        "v_head_dim": f("v_head_dim"),
    }
    return decoder(f, **attention) | deepseek_experts(f) | _rope(f)


def _rope(f: Fields) -> dict[str, Any]:
    """MLA has its own rotary embedding in every layer, with yarn's two scales."""
    found = rope_parameters(f)
    arguments: dict[str, Any] = {"rope_type": "rope", "rotary_base": found["rope_theta"], "rotary_scaling_factor": 1.0}
    if found["rope_type"] == "yarn":
        if found.get("attention_factor") is not None or not found.get("truncate", True):
            raise ValueError(f"{f.path}/config.json: attention_factor and truncate of yarn are not built for MLA")
        mscale, all_dim = found.get("mscale"), found.get("mscale_all_dim")
        if bool(mscale) != bool(all_dim) and (all_dim or mscale != 1.0):
            raise ValueError(
                f"{f.path}/config.json: of mscale and mscale_all_dim of yarn an MLA model must have both or neither, "
                f"got {mscale!r} and {all_dim!r}; engines and transformers compute different things from one of them"
            )
        arguments |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": found["factor"],
            "original_max_position_embeddings": found["original_max_position_embeddings"],
            "beta_fast": found.get("beta_fast") or 32,
            "beta_slow": found.get("beta_slow") or 1,
            "mscale": mscale or 1.0,
            "mscale_all_dim": all_dim or 0.0,
        }
    elif found["rope_type"] != "default":
        raise ValueError(f"{f.path}/config.json: rope_type of an MLA model must be default or yarn, got {found!r}")
    return arguments


def _rules(f: Fields) -> Rules:
    ours, theirs = "self_attention.", LAYER + "self_attn."
    return outer_rules(f) | {
        "input_layernorm.weight": Whole(LAYER + "input_layernorm.weight"),
        ours + "linear_q_proj.weight": Rows(theirs + "q_proj.weight"),
        ours + "linear_q_down_proj.weight": Whole(theirs + "q_a_proj.weight"),
        ours + "q_layernorm.weight": Whole(theirs + "q_a_layernorm.weight"),
        ours + "linear_q_up_proj.weight": Rows(theirs + "q_b_proj.weight"),
        ours + "linear_kv_down_proj.weight": Whole(theirs + "kv_a_proj_with_mqa.weight"),
        ours + "kv_layernorm.weight": Whole(theirs + "kv_a_layernorm.weight"),
        ours + "linear_kv_up_proj.weight": Rows(theirs + "kv_b_proj.weight"),
        ours + "linear_proj.weight": Columns(theirs + "o_proj.weight"),
        "pre_mlp_layernorm.weight": Whole(LAYER + "post_attention_layernorm.weight"),
        **gated_mlp(LAYER + "mlp.", "mlp"),
        **expert_rules(),
    }


DEEPSEEK_V3 = Family("deepseek_v3", _deepseek_v3, _rules, is_mla=True, has_extra_layers=True)
