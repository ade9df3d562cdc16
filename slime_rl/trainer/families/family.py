"""What a family of models is: its Megatron configuration and its weights, both from config.json.

    Family ──► transformer(fields)      fields of Megatron's TransformerConfig
           ──► rules(fields)            Megatron parameter name -> rule (families/rules.py)
           ──► adjust_spec, finish      modules that differ from Megatron's own; both optional

Parameter names are those of Megatron's local layer spec, without layer and expert numbers:
`self_attention.linear_qkv.weight` of every layer is `decoder.layers.{layer}.self_attention.linear_qkv.weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.rules import Columns, QueryKeyValue, Rule, Stacked, Vocabulary, Whole
from slime_rl.trainer.rope import rope_parameters

LAYER = "model.layers.{layer}."
Rules = dict[str, Rule]


@dataclass(frozen=True)
class Family:
    """One architecture. `transformer` reads every field that matters; `Fields` refuses the rest."""

    name: str
    transformer: Callable[[Fields], dict[str, Any]]
    rules: Callable[[Fields], Rules]
    is_mla: bool = False
    # Its folders may hold layers for predicting further tokens: as many as num_nextn_predict_layers says.
    has_extra_layers: bool = False
    # Replaces modules in Megatron's block spec, in place. Such a family uses Megatron's local modules on a GPU too,
    # since Transformer Engine's fuse the norms that it moves.
    adjust_spec: Callable[[Fields, Any], None] | None = None
    # Last touches on a GPTModel (one pipeline stage).
    finish: Callable[[Fields, Any], None] | None = None


def head_dim_of(f: Fields) -> int:
    """Channels of one attention head: its own field, else hidden size over heads."""
    own = f("head_dim", None)
    hidden, heads = f("hidden_size"), f("num_attention_heads")
    if own is None and hidden % heads:
        raise ValueError(f"{f.path}/config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return own or hidden // heads


def decoder(f: Fields, *, rotates_part: bool = False, **changes: Any) -> dict[str, Any]:
    """TransformerConfig of a plain decoder: RMSNorm before each part, grouped queries, gated SiLU MLP, no biases.

    `rotates_part`: partial_rotary_factor has an effect in this family.
    """
    f.must_be("hidden_act", "silu", default="silu") if "activation_func" not in changes else f("hidden_act")
    kinds = set(f("layer_types", None) or []) - {"full_attention"}
    if kinds:
        raise ValueError(f"{f.path}/config.json: layer_types may only be full_attention here, got {sorted(kinds)}")
    part = rope_parameters(f)["partial_rotary_factor"]
    if part != 1.0 and not rotates_part:
        raise ValueError(
            f"{f.path}/config.json: partial_rotary_factor of a {f.model_type} model must be 1, got {part}; "
            "transformers rotates all channels whatever it says"
        )
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if f(name) < 1:
            raise ValueError(f"{f.path}/config.json: {name} must be > 0, got {f(name)}")
    heads, groups = f("num_attention_heads"), f("num_key_value_heads", None) or f("num_attention_heads")
    if groups < 1 or heads % groups:
        raise ValueError(
            f"{f.path}/config.json: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
            f"{groups}"
        )
    base: dict[str, Any] = {
        "num_layers": f("num_hidden_layers"),
        "hidden_size": f("hidden_size"),
        "ffn_hidden_size": f("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }
    if "layernorm_epsilon" not in changes:
        base["layernorm_epsilon"] = f("rms_norm_eps")
    if "multi_latent_attention" not in changes:
        base["kv_channels"] = head_dim_of(f)
    return base | changes


def biases(f: Fields) -> dict[str, Any]:
    """Llama's two switches. Megatron has one for all projections of a layer and one for query, key and value alone.

    Raises:
        ValueError: biases on the attention only (its output projection has one too) or on the MLP only.
    """
    attention, mlp = bool(f("attention_bias", False)), bool(f("mlp_bias", False))
    if attention != mlp:
        raise ValueError(
            f"{f.path}/config.json: attention_bias and mlp_bias must be equal, got {attention} and {mlp}; Megatron "
            "cannot leave the biases of one of them out"
        )
    return {"add_bias_linear": attention, "add_qkv_bias": attention}


def no_sliding_window(f: Fields) -> None:
    """Qwen's fields of windowed attention, which must be off."""
    f.must_be("use_sliding_window", False, default=False)
    f.ignore("sliding_window", "max_window_layers")


def experts(f: Fields, *, count: str, pattern: list[int], **changes: Any) -> dict[str, Any]:
    """TransformerConfig of a mixture of experts. `pattern` holds 1 for each layer that has experts, else 0.

    Nothing is added for balance: auxiliary losses and moving router biases are for pre-training.
    """
    return {
        "num_moe_experts": f(count),
        "moe_ffn_hidden_size": f("moe_intermediate_size") if "moe_ffn_hidden_size" not in changes else 0,
        "moe_router_topk": f("num_experts_per_tok"),
        "moe_layer_freq": pattern,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_shared_expert_overlap": False,
    } | changes


def softmax_router(f: Fields) -> dict[str, Any]:
    """Probabilities of the chosen experts, that sum up to 1 or are those among all experts."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not f("norm_topk_prob", True)}


def sigmoid_router(f: Fields) -> dict[str, Any]:
    """DeepSeek-V3's router: sigmoid scores, a bias that only chooses, expert groups, a scaling factor."""
    f.must_be("norm_topk_prob", True)  # Megatron always normalises sigmoid scores
    f.must_be("scoring_func", "sigmoid", default="sigmoid")
    f.must_be("topk_method", "noaux_tc", default="noaux_tc")
    arguments: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": f("routed_scaling_factor"),
    }
    groups, chosen = f("n_group", None), f("topk_group", None)
    if groups and groups > 1:
        arguments |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return arguments


def deepseek_experts(f: Fields) -> dict[str, Any]:
    """DeepSeek-V3's mixture: dense first layers, then experts beside shared ones, behind its router."""
    f.ignore("num_nextn_predict_layers", "num_mtp_layers")  # carried along, see deepseek.py
    dense, shared = f("first_k_dense_replace"), f("moe_intermediate_size") * (f("n_shared_experts") or 0)
    pattern = [int(i >= dense) for i in range(f("num_hidden_layers"))]
    moe = experts(f, count="n_routed_experts", pattern=pattern, moe_shared_expert_intermediate_size=shared or None)
    return moe | sigmoid_router(f)


def gated_mlp(
    prefix: str, megatron: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Rules:
    """Weights and biases of one gated MLP."""
    return {
        f"{megatron}.linear_fc1.weight": Stacked((f"{prefix}{gate}.weight", f"{prefix}{up}.weight")),
        f"{megatron}.linear_fc1.bias": Stacked((f"{prefix}{gate}.bias", f"{prefix}{up}.bias")),
        f"{megatron}.linear_fc2.weight": Columns(f"{prefix}{down}.weight"),
        f"{megatron}.linear_fc2.bias": Whole(f"{prefix}{down}.bias"),
    }


def outer_rules(f: Fields) -> Rules:
    """Embedding, last norm, output layer."""
    vocab_size, embedding = f("vocab_size"), "model.embed_tokens.weight"
    tied = bool(f("tie_word_embeddings", False))
    return {
        "embedding.word_embeddings.weight": Vocabulary(embedding, vocab_size),
        "decoder.final_layernorm.weight": Whole("model.norm.weight"),
        "output_layer.weight": Vocabulary(embedding if tied else "lm_head.weight", vocab_size),
    }


def standard_rules(f: Fields) -> Rules:
    """Llama's names, which most families share; a name that a model does not have is not used."""
    heads = f("num_attention_heads")
    groups = f("num_key_value_heads", None) or heads
    attention, norm = LAYER + "self_attn.", "post_attention_layernorm.weight"
    qkv = [QueryKeyValue(tuple(f"{attention}{p}_proj.{kind}" for p in "qkv"), groups, heads // groups, head_dim_of(f))
           for kind in ("weight", "bias")]  # fmt: skip
    return outer_rules(f) | {
        "input_layernorm.weight": Whole(LAYER + "input_layernorm.weight"),
        "self_attention.linear_qkv.weight": qkv[0],
        "self_attention.linear_qkv.bias": qkv[1],
        "self_attention.linear_proj.weight": Columns(attention + "o_proj.weight"),
        "self_attention.linear_proj.bias": Whole(attention + "o_proj.bias"),
        "self_attention.q_layernorm.weight": Whole(attention + "q_norm.weight"),
        "self_attention.k_layernorm.weight": Whole(attention + "k_norm.weight"),
        "pre_mlp_layernorm.weight": Whole(LAYER + norm),
        **gated_mlp(LAYER + "mlp.", "mlp"),
    }


def expert_rules(block: str = "mlp", shared: str = "shared_experts", **mlp_names: str) -> Rules:
    """Router, experts and shared expert of a layer's part `block`."""
    prefix = f"{LAYER}{block}."
    return {
        "mlp.router.weight": Whole(prefix + "gate.weight"),
        "mlp.router.expert_bias": Whole(prefix + "gate.e_score_correction_bias"),
        **gated_mlp(prefix + "experts.{expert}.", "mlp.experts.local_experts.{expert}", **mlp_names),
        **gated_mlp(f"{prefix}{shared}.", "mlp.shared_experts"),
        "mlp.shared_experts.gate_weight": Whole(f"{prefix}{shared}_gate.weight"),
    }
