"""The Megatron model that a Hugging Face folder asks for.

config.json ──► Family (families/) ──► TransformerConfig, layer spec, rotary frequencies ──► GPTModel of one stage
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from slime_rl.config import Config
from slime_rl.trainer.arguments import parse_megatron_args
from slime_rl.trainer.cpu.attention import use_local_modules
from slime_rl.trainer.device import resolve_device
from slime_rl.trainer.families.family import Family, head_dim_of
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.rope import rotary_frequencies

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Kernels and fusions that need Transformer Engine, Apex or CUDA.
WITHOUT_TRANSFORMER_ENGINE: dict[str, Any] = {
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "attention_backend": AttnBackend.auto,
    "cp_comm_type": "all_gather",
}
WITH_TRANSFORMER_ENGINE: dict[str, Any] = {
    "masked_softmax_fusion": True,
    "persist_layer_norm": True,
    "bias_dropout_fusion": True,
}


@dataclass(frozen=True)
class Architecture:
    """A model to build. `build(first, last, vp_stage)` makes the GPTModel of a pipeline stage, without weights."""

    config: TransformerConfig
    vocab_size: int
    padded_vocab_size: int
    build: Callable[[bool, bool, int | None], Any]


def open_architecture(config: Config, fields: Fields, family: Family) -> Architecture:
    """The model of a folder in a family.

    Raises:
        ValueError: a field of config.json that the family does not know, or whose value it cannot compute.
    """
    has_te = resolve_device(config.cluster.device).has_transformer_engine and family.adjust_spec is None
    arguments = family.transformer(fields)
    rotary = None
    if not family.is_mla:
        rotary = rotary_frequencies(fields, head_dim_of(fields))
        if rotary[2] != 1.0:  # yarn's factor on rotated queries and keys: its square on their products
            arguments["softmax_scale"] = rotary[2] ** 2 * head_dim_of(fields) ** -0.5
            if rotary[1] != 1.0:
                raise ValueError(f"{fields.path}/config.json: yarn on a part of the channels is not supported")
    family.rules(fields)
    fields.quantization()
    fields.check_all_read()
    arguments["bias_activation_fusion"] = (
        arguments["activation_func"] is F.silu
    )  # of the others Megatron knows no fusion
    arguments |= run_arguments(config, has_te)
    transformer = (MLATransformerConfig if family.is_mla else TransformerConfig)(**arguments)
    tp, vocab_size = config.parallel.tensor_model_parallel_size, fields("vocab_size")
    padded = -(-vocab_size // tp) * tp

    def build(first: bool, last: bool, vp_stage: int | None) -> Any:
        spec = _block_spec(transformer, has_te, vp_stage)
        if family.adjust_spec is not None:
            family.adjust_spec(fields, spec)
        optional: dict[str, Any] = {} if rotary is None else {"rotary_percent": rotary[1]}
        if vp_stage is not None:
            optional["vp_stage"] = vp_stage
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=spec,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=bool(fields("tie_word_embeddings", False)),
            vocab_size=padded,
            max_sequence_length=fields("max_position_embeddings"),
            position_embedding_type="rope",
            **optional,
        )
        if rotary is not None:
            model.rotary_pos_emb.inv_freq = rotary[0].to(model.rotary_pos_emb.inv_freq.device)
        if family.finish is not None:
            family.finish(fields, model)
        return model

    return Architecture(transformer, vocab_size, padded, build)


def _block_spec(transformer: TransformerConfig, has_te: bool, vp_stage: int | None) -> Any:
    accepts_stage = "vp_stage" in inspect.signature(get_gpt_decoder_block_spec).parameters
    optional: dict[str, Any] = {"vp_stage": vp_stage} if accepts_stage else {}
    spec = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=has_te,
        normalization=transformer.normalization,
        **optional,
    )
    return spec if has_te else use_local_modules(spec, transformer.normalization)


def run_arguments(config: Config, has_te: bool) -> dict[str, Any]:
    """Fields of TransformerConfig that depend on the run and not on the model."""
    dtype, vpp = DTYPES[config.model.train_dtype], mpu.get_virtual_pipeline_model_parallel_world_size()
    pp = mpu.get_pipeline_model_parallel_world_size()
    arguments: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
        "overlap_p2p_comm": vpp is not None and pp > 1,
        "batch_p2p_comm": False,
        "calculate_per_token_loss": True,  # gradients are plain sums: token weights already hold every denominator
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # Megatron checks it in dense models too
        "sequence_parallel": config.parallel.sequence_parallel,
        "attention_dropout": 0.0,  # the engines have none, and log-probs must be theirs
        "hidden_dropout": 0.0,
        "use_cpu_initialization": resolve_device(config.cluster.device).kind == "cpu",
        "perform_initialization": False,  # the weights come from the checkpoint
    }
    arguments |= WITH_TRANSFORMER_ENGINE if has_te else WITHOUT_TRANSFORMER_ENGINE
    if config.model.recompute_activations:
        arguments |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    given = parse_megatron_args(config.model.megatron_args).transformer
    if given.get("moe_aux_loss_coeff"):  # the families turn balancing off; who gives its weight wants it
        arguments["moe_router_load_balancing_type"] = "aux_loss"
    return arguments | given
