"""A model's shape from its config.json: parameters by part, and the widths that memory and arithmetic depend on.

Letters: h hidden size, a query heads, g key-value heads, d head dimension, f MLP width, V vocabulary, E experts.

    embedding V·h, output V·h unless tied, last norm h; a layer has two norms of h (families: `_NORMS`) and
    attention   h·a·d + 2·h·g·d + a·d·h   (biases and q/k norms as config.json says)
    latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): low-rank queries and keys-values as written in `_latent`
    MLP         3·h·f                     (gate, up, down)
    experts     E · 3·h·f_expert, a router of h·E, shared experts, dense MLPs in the first layers
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A bias on the query, key and value projections that config.json does not mention.
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_QK_NORM = {"qwen3", "qwen3_moe"}
_WIDE_QK_NORM = {"olmo2", "olmoe"}  # over all heads at once
_NORMS = {"glm4": 4, "olmo": 0}  # norms of a layer that have weights; 2 elsewhere
_TIED = {"gemma", "smollm3"}  # where config.json does not say so
_ROUTER_BIAS = {"deepseek_v3", "glm4_moe"}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Numbers of parameters are of one layer, one expert, or the whole matrix, before any split."""

    model_type: str
    num_layers: int
    num_moe_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    positions: int | None  # longest sequence the model is made for
    query_heads: int
    kv_heads: int
    attention: int  # matrices of one layer's attention; split by tensor parallelism
    last_norm: int
    norms: int  # what one layer has on every tensor-parallel worker: norms, and latent attention's down projections
    dense_mlp: int  # MLP of a layer without experts
    shared_mlp: int  # shared experts of a layer with experts
    router: int
    expert: int  # one expert
    num_experts: int
    experts_per_token: int
    query_width: int  # a·d
    kv_width: int  # g·d; kv_lora_rank + rope dimension with latent attention
    kv_per_token: int  # values that one layer caches for one token
    kv_splits: bool  # whether tensor parallelism splits the cache
    mlp_width: int  # f of a dense layer
    moe_mlp_width: int  # f_expert · experts per token + shared width, in a layer with experts

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def output(self) -> int:
        return 0 if self.tied else self.embedding

    @property
    def moe_layer(self) -> int:
        """Parameters of one layer with experts."""
        experts = self.num_experts * self.expert
        return self.attention + self.norms + self.shared_mlp + self.router + experts

    @property
    def dense_layer(self) -> int:
        return self.attention + self.norms + self.dense_mlp

    @property
    def parameters(self) -> int:
        layers = self.num_moe_layers * self.moe_layer + (self.num_layers - self.num_moe_layers) * self.dense_layer
        return self.embedding + self.output + layers + self.last_norm

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with; the embedding is looked up, the output matrix counts."""
        idle = self.num_moe_layers * (self.num_experts - self.experts_per_token) * self.expert
        return self.parameters - idle - (0 if self.tied else self.embedding)


def read_shape(hf_checkpoint: str | Path) -> ModelShape:
    """The shape of a Hugging Face folder.

    Raises:
        ValueError: config.json misses a size, or has an attention that is not known here.
    """
    path = Path(hf_checkpoint) / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    _check_kinds(path, raw)
    raw = {**raw, **(raw.get("text_config") or {})}
    raw = {name: value for name, value in raw.items() if value is not None}  # null is as good as not there
    _check_kinds(path, raw)
    _check_sizes(path, raw)
    try:
        return _shape(raw)
    except KeyError as error:
        raise ValueError(f"{path}: has no {error.args[0]!r}, which a model's shape is made of") from error


# Sizes that must be whole numbers of at least 1 wherever they are given.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)

# Sizes of experts and latent attention, 0 where a model has none.
_COUNTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "moe_layer_freq",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
)
_KINDS: dict[str, tuple[type, str]] = {
    "text_config": (dict, "an object"),
    "model_type": (str, "a text"),
    "mlp_only_layers": (list, "a list of layers"),
}


def _check_kinds(path: Path, raw: dict[str, Any]) -> None:
    for name, (kind, text) in _KINDS.items():
        if raw.get(name) is not None and not isinstance(raw[name], kind):
            raise ValueError(f"{path}: {name} must be {text}, got {raw[name]!r}")


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    for names, least, rule in ((_SIZES, 1, "> 0"), (_COUNTS, 0, ">= 0")):
        for name in names:
            value = raw.get(name)
            is_size = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if value is not None and not is_size:
                raise ValueError(f"{path}: {name} must be a whole number {rule}, got {value!r}")
    heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise ValueError(f"{path}: num_key_value_heads must divide num_attention_heads = {heads}, got {groups}")
    has_head_dim = raw.get("head_dim") or raw.get("kv_lora_rank") is not None
    if not has_head_dim and heads and raw.get("hidden_size", 0) % heads:
        raise ValueError(
            f"{path}: hidden_size must be a multiple of num_attention_heads = {heads} where there is no head_dim, "
            f"got {raw['hidden_size']}"
        )


def _shape(raw: dict[str, Any]) -> ModelShape:
    h, layers = raw["hidden_size"], raw["num_hidden_layers"]
    heads = raw["num_attention_heads"]
    is_latent = raw.get("kv_lora_rank") is not None
    attention = _latent(raw) if is_latent else _grouped(raw)
    experts = raw.get("num_experts") or raw.get("n_routed_experts") or raw.get("num_local_experts") or 0
    top = raw.get("num_experts_per_tok") or 0 if experts else 0
    width = raw.get("moe_intermediate_size") or raw["intermediate_size"]
    shared = raw.get("shared_expert_intermediate_size") or (raw.get("n_shared_experts") or 0) * width
    gate = h if raw.get("shared_expert_intermediate_size") else 0  # Qwen2-MoE gates its shared expert
    router_bias = experts if raw["model_type"] in _ROUTER_BIAS else 0
    return ModelShape(
        model_type=raw["model_type"],
        num_layers=layers,
        num_moe_layers=_num_moe_layers(raw, layers) if experts else 0,
        hidden_size=h,
        vocab_size=raw["vocab_size"],
        tied=bool(raw.get("tie_word_embeddings", raw["model_type"] in _TIED)),
        last_norm=h if _NORMS.get(raw["model_type"], 2) else 0,
        positions=raw.get("max_position_embeddings"),
        query_heads=heads,
        kv_heads=heads if is_latent else raw.get("num_key_value_heads") or heads,
        dense_mlp=3 * h * raw["intermediate_size"],
        shared_mlp=(3 * h * shared + gate) if experts else 0,
        router=(h * experts + router_bias) if experts else 0,
        expert=3 * h * width if experts else 0,
        num_experts=experts,
        experts_per_token=top,
        mlp_width=raw["intermediate_size"],
        moe_mlp_width=(top * width + shared) if experts else 0,
        **attention,
    )


def _grouped(raw: dict[str, Any]) -> dict[str, Any]:
    """Grouped-query attention (arXiv:2305.13245)."""
    h, a = raw["hidden_size"], raw["num_attention_heads"]
    g = raw.get("num_key_value_heads") or a
    d = raw.get("head_dim") or h // a
    bias = (a + 2 * g) * d if raw["model_type"] in _QKV_BIAS or raw.get("attention_bias") else 0
    if raw.get("attention_bias") and raw["model_type"] == "llama":
        bias += h  # Llama's switch covers the output projection too
    qk_norm = 2 * d if raw["model_type"] in _QK_NORM or raw.get("use_qk_norm") else 0
    if raw["model_type"] in _WIDE_QK_NORM:
        qk_norm = (a + g) * d
    return {
        "attention": 2 * h * a * d + 2 * h * g * d + bias,
        "norms": _NORMS.get(raw["model_type"], 2) * h + qk_norm,
        "query_width": a * d,
        "kv_width": g * d,
        "kv_per_token": 2 * g * d,
        "kv_splits": True,
    }


def _latent(raw: dict[str, Any]) -> dict[str, Any]:
    """Multi-head latent attention: cached is one compressed vector and one rotary key a token, shared by all heads."""
    h, a, rank, rope = raw["hidden_size"], raw["num_attention_heads"], raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    nope, value, query_rank = raw["qk_nope_head_dim"], raw["v_head_dim"], raw.get("q_lora_rank")
    query_up = (query_rank or h) * a * (nope + rope)
    down = h * (rank + rope) + rank + (h * query_rank + query_rank if query_rank else 0)
    return {
        "attention": query_up + rank * a * (nope + value) + a * value * h,
        "norms": 2 * h + down,
        "query_width": a * (nope + rope),
        "kv_width": rank + rope,
        "kv_per_token": rank + rope,
        "kv_splits": False,
    }


def _num_moe_layers(raw: dict[str, Any], layers: int) -> int:
    first_dense = raw.get("first_k_dense_replace", 0)
    dense = set(raw.get("mlp_only_layers") or ())
    every = raw.get("decoder_sparse_step") or raw.get("moe_layer_freq") or 1
    if raw["model_type"] in ("qwen2_moe", "qwen3_moe"):  # counts from 1: step 2 means layers 1, 3, …
        return sum(i not in dense and (i + 1) % every == 0 for i in range(layers))
    return sum(i >= first_dense and i % every == 0 for i in range(layers))
