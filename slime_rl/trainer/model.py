"""The Megatron model of this worker: built from the checkpoint's config, output layer deferred to the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from slime_rl.config import Config
from slime_rl.trainer.architecture import Architecture
from slime_rl.trainer.cpu.attention import PackedAttention
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.plugins import build_stage
from slime_rl.trainer.shared_prompts import SharedPromptParams


def build_models(config: Config, architecture: Architecture, layout: Layout, device: torch.device) -> list[Any]:
    """The model chunks of this pipeline stage (one unless stages are interleaved), on `device`, without weights.

    In bfloat16 each is wrapped in Float16Module.
    """
    models = []
    for stage in range(layout.vpp_size or 1):
        vp_stage = stage if layout.vpp_size else None
        where = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        first, last = mpu.is_pipeline_first_stage(**where), mpu.is_pipeline_last_stage(**where)
        model = build_stage(config, architecture, first, last, vp_stage)
        _mark_parallel_weights(model)
        _defer_output_layer(model)
        model.to(device)
        models.append(Float16Module(architecture.config, model) if architecture.config.bf16 else model)
    return models


def _mark_parallel_weights(model: Any) -> None:
    """Say which weights are split over the tensor-parallel workers, which Megatron does only where it initialises them.

    Without the mark the gradient norm counts the part of the first worker alone.
    """
    split_at = {
        tensor_parallel.ColumnParallelLinear: 0,
        tensor_parallel.VocabParallelEmbedding: 0,
        tensor_parallel.RowParallelLinear: 1,
    }
    for module in model.modules():
        for kind, dim in split_at.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, kind) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
                tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def freeze(models: list[Any], patterns: tuple[str, ...]) -> None:
    """Take the parameters whose name over the whole model matches out of training; before DDP. Collective.

    Raises:
        ValueError: a pattern matches nothing, or nothing is left to train.
    """
    matched, num_left = set(), 0
    for model in models:
        for name, parameter in global_names(unwrap(model)):
            hits = {pattern for pattern in patterns if re.search(pattern, name)}
            parameter.requires_grad_(not hits)
            matched |= hits
            num_left += not hits
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (matched, num_left))
    unused = [pattern for pattern in patterns if not any(pattern in hits for hits, _ in everywhere)]
    if unused:
        raise ValueError(f"--freeze-params: no parameter of the model has a name that {unused[0]!r} is found in")
    if not all(left for _, left in everywhere):
        raise ValueError(f"--freeze-params {' '.join(patterns)}: nothing is left to train on some worker")


def global_names(gpt: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a pipeline stage, layers counted over the whole model.

    A tied output layer on a stage of its own is the embedding: frozen on one stage alone, its gradients would be waited
    for by the other forever.
    """

    def renumber(match: re.Match[str]) -> str:
        return f"decoder.layers.{gpt.decoder.layers[int(match[1])].layer_number - 1}."

    for name, parameter in gpt.named_parameters():
        if gpt.share_embeddings_and_output_weights and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield re.sub(r"decoder\.layers\.(\d+)\.", renumber, name), parameter


def _defer_output_layer(model: Any) -> None:
    """Let the last stage return hidden states, so that logits are made only where a response token is predicted."""

    def hidden_states_only(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    model._postprocess = hidden_states_only


def prepare_shared_prompts(models: list[Any]) -> bool:
    """Make the model's chunks ready for passes with shared prompts; False where those would not be the same."""
    gpts = [unwrap(model) for model in models]
    if not all(_can_share_prompts(gpt) for gpt in gpts):
        return False
    for gpt in gpts:
        _rotate_by_position(gpt)
    return True


def _can_share_prompts(gpt: Any) -> bool:
    if getattr(gpt, "position_embedding_type", None) != "rope" or gpt.config.multi_latent_attention:
        return False
    if gpt.config.num_moe_experts and (gpt.config.moe_aux_loss_coeff or gpt.config.moe_z_loss_coeff):
        return False  # these losses count every token once
    return all(isinstance(layer.self_attention.core_attention, PackedAttention) for layer in gpt.decoder.layers)


def _rotate_by_position(gpt: Any) -> None:
    """With shared prompts, take the rotary angles `[t, 1, 1, d]` of each token's position in its own sequence."""
    preprocess = gpt._preprocess

    def with_positions(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        decoder_input, angles, *others = preprocess(*args, **kwargs)
        if isinstance(kwargs.get("packed_seq_params"), SharedPromptParams):
            angles = angles.index_select(0, kwargs["position_ids"][0])
        return decoder_input, angles, *others

    gpt._preprocess = with_positions


def unwrap(model: Any) -> Any:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def output_weight(model: Any) -> Tensor:
    """Weight `[V/tp, H]` of the output layer, the embedding's where they are tied; last stage only."""
    gpt = unwrap(model)
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight
