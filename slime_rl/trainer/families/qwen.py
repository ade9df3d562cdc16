"""Qwen2 and Qwen2.5 (biases on query, key and value), Qwen3 (query-key norm), and both with experts."""

from __future__ import annotations

from typing import Any

from slime_rl.trainer.families.family import (
    Family,
    Rules,
    decoder,
    expert_rules,
    experts,
    no_sliding_window,
    softmax_router,
    standard_rules,
)
from slime_rl.trainer.families.fields import Fields


def _qwen2(f: Fields) -> dict[str, Any]:
    no_sliding_window(f)
    f.ignore("use_mrope")
    return decoder(f, add_qkv_bias=True)


def _qwen3(f: Fields) -> dict[str, Any]:
    no_sliding_window(f)
    f.must_be("attention_bias", False, default=False)
    return decoder(f, qk_layernorm=True)


def expert_pattern(f: Fields) -> list[int]:
    """1 where a layer has experts: every `decoder_sparse_step`-th, unless it is listed in `mlp_only_layers`."""
    step, dense = f("decoder_sparse_step"), f("mlp_only_layers", None) or []
    return [int(i not in dense and (i + 1) % step == 0) for i in range(f("num_hidden_layers"))]


def _qwen2_moe(f: Fields) -> dict[str, Any]:
    no_sliding_window(f)
    shared = f("shared_expert_intermediate_size")
    moe = experts(
        f,
        count="num_experts",
        pattern=expert_pattern(f),
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=True,
    )
    return decoder(f, add_qkv_bias=bool(f("qkv_bias", True))) | moe | softmax_router(f)


def _qwen3_moe(f: Fields) -> dict[str, Any]:
    moe = experts(f, count="num_experts", pattern=expert_pattern(f))
    return _qwen3(f) | moe | softmax_router(f)


def _moe_rules(f: Fields) -> Rules:
    return standard_rules(f) | expert_rules(shared="shared_expert")


QWEN2 = Family("qwen2", _qwen2, standard_rules)
QWEN2_MOE = Family("qwen2_moe", _qwen2_moe, _moe_rules)
QWEN3 = Family("qwen3", _qwen3, standard_rules)
QWEN3_MOE = Family("qwen3_moe", _qwen3_moe, _moe_rules)
