"""Mixtral: Mistral with experts in every layer, under names of its own."""

from __future__ import annotations

from typing import Any

from slime_rl.trainer.families.family import Family, Rules, decoder, expert_rules, experts, standard_rules
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.llama import window


def _mixtral(f: Fields) -> dict[str, Any]:
    pattern = [1] * f("num_hidden_layers")
    moe = experts(f, count="num_local_experts", pattern=pattern, moe_ffn_hidden_size=f("intermediate_size"))
    router = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}  # always sum up to 1
    return decoder(f, **window(f)) | moe | router


def _rules(f: Fields) -> Rules:
    return standard_rules(f) | expert_rules("block_sparse_moe", gate="w1", up="w3", down="w2")


MIXTRAL = Family("mixtral", _mixtral, _rules)
