"""Random checkpoints of every family, written by transformers, small enough to make in moments.

No two dimensions of a model are equal, so that a transposed or mixed-up weight cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 131  # a prime: no tensor-parallel size divides it
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
}
SIGMOID_MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
MLA: dict[str, Any] = SIGMOID_MOE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,  # SGLang wants it, and real checkpoints have it
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}

# What is built and checked: name, kind, changes to the kind's config. The names are those of docs/models.md.
CATALOGUE: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {"head_dim": None}),
    "Llama 3 (scaled rotary)": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "SmolLM3 (layers without positions)": ("smollm3", {}),
    "Mistral (window of 7 tokens)": ("mistral", {"sliding_window": 7}),
    "Mixtral": ("mixtral", {}),
    "Qwen2.5 (biases)": ("qwen2", {}),
    "Qwen2.5 (yarn)": ("qwen2", {"rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None}}),
    "Qwen2-MoE (gated shared expert)": ("qwen2_moe", {}),
    "Qwen3 (query-key norm)": ("qwen3", {}),
    "Qwen3, tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Qwen3-MoE (some layers dense)": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "GLM-4": ("glm4", {}),
    "GLM-4.5": ("glm4_moe", {}),
    "DeepSeek-V3 (yarn, groups of experts)": ("deepseek_v3", {"rope_parameters": YARN}),
    "DeepSeek-V3 with MTP layer": ("deepseek_v3", {"num_nextn_predict_layers": 1, "rope_parameters": YARN}),
    "Kimi-K2 (yarn)": ("deepseek_v3", {"rope_parameters": YARN, "n_group": 1}),
    "Moonlight (no query compression)": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1}),
    "Gemma": ("gemma", {}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMoE": ("olmoe", {}),
}
IS_MOE = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "olmoe"})


def _makers(overrides: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    import transformers as hf

    def config(cls: Any, *parts: dict[str, Any], **fields: Any) -> Callable[[], Any]:
        merged: dict[str, Any] = dict(SHAPE)
        for part in (*parts, fields, overrides):
            merged |= part
        return lambda: cls(**merged)

    no_eps = {"rms_norm_eps": 1e-5}
    mixtral = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    glm = {"head_dim": 16, "use_qk_norm": True, "attention_bias": True}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return {
        "llama": config(hf.LlamaConfig, head_dim=12),
        "smollm3": config(hf.SmolLM3Config, tie_word_embeddings=True),
        "mistral": config(hf.MistralConfig, head_dim=16),
        "mixtral": config(hf.MixtralConfig, mixtral),
        "qwen2": config(hf.Qwen2Config),
        "qwen2_moe": config(hf.Qwen2MoeConfig, MOE, shared_expert_intermediate_size=56),
        "qwen3": config(hf.Qwen3Config, head_dim=16, tie_word_embeddings=False),
        "qwen3_moe": config(hf.Qwen3MoeConfig, MOE, head_dim=16),
        "glm4": config(hf.Glm4Config, head_dim=16, rope_parameters=rotary),
        "glm4_moe": config(hf.Glm4MoeConfig, SIGMOID_MOE, glm, rope_parameters=rotary),
        "deepseek_v3": config(hf.DeepseekV3Config, MLA),
        "gemma": config(hf.GemmaConfig, head_dim=16, pad_token_id=0),
        "olmo": config(hf.OlmoConfig, rms_norm_eps=None, num_key_value_heads=4),
        "olmo2": config(hf.Olmo2Config, no_eps),
        "olmoe": config(hf.OlmoeConfig, no_eps, num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
    }


def make_checkpoint(folder: Path, kind: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Any:
    """A random model of an architecture (a key of `_makers`), saved by transformers; returns the transformers model."""
    import transformers as hf

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # some defaults lie beyond this vocabulary
    config = _makers(special | overrides)[kind]()
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases that matter
            else:
                parameter.normal_(0, 0.08)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)
    model.save_pretrained(folder)
    if overrides.get("num_nextn_predict_layers"):
        add_next_token_layer(folder, config.num_hidden_layers, config.hidden_size)
    return model


def make_named(folder: Path, name: str, **overrides: Any) -> Any:
    """The model of a name of CATALOGUE."""
    kind, changes = CATALOGUE[name]
    return make_checkpoint(folder, kind, **changes | overrides)


def add_next_token_layer(folder: Path, layer: int, hidden: int) -> None:
    """A layer for predicting a second token, which transformers does not save, in a file of its own."""
    from safetensors.torch import save_file

    names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "input_layernorm.weight", "shared_head.norm.weight")
    shapes = [(hidden,), (hidden,), (hidden, 2 * hidden), (hidden,), (hidden,)]
    tensors = {f"model.layers.{layer}.{n}": torch.randn(s) for n, s in zip(names, shapes, strict=True)}
    save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
