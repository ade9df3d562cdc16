"""Everything a worker trains with, from the config and the process groups."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from slime_rl.algorithms.adaptive_kl import AdaptiveKL
from slime_rl.config import Config
from slime_rl.config.quantization import FIELD
from slime_rl.trainer.architecture import Architecture
from slime_rl.trainer.arguments import parse_megatron_args
from slime_rl.trainer.critic import critic_config
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.families.fields import WITHOUT_EFFECT
from slime_rl.trainer.forward import CriticHead, PolicyHead, TokenHead
from slime_rl.trainer.head import head_spec
from slime_rl.trainer.model import build_models, freeze, prepare_shared_prompts
from slime_rl.trainer.optimizer import make_optimizer, make_scheduler, wrap_ddp
from slime_rl.trainer.plugins import open_conversion
from slime_rl.trainer.reference import ReferenceWeights
from slime_rl.trainer.router_losses import RouterLosses
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.value_head import attach_value_head


def build_state(config: Config, layout: Layout, device: torch.device) -> tuple[TrainState, Any]:
    """(state, weight conversion): model with the checkpoint's weights, reference, DDP, optimizer and schedule.

    Raises:
        ValueError: parallel sizes, a reference or a checkpoint that do not fit the model.
    """
    path = config.model.hf_checkpoint
    conversion = open_conversion(config, path)
    architecture = conversion.architecture
    _check_shape(config, architecture.config)
    models = build_models(config, architecture, layout, device)
    reference = None
    if config.algorithm.needs_reference:
        _check_same_shape("--ref-load", config, config.model.reference_path)
        conversion.load_weights(models, config.model.reference_path)
        reference = ReferenceWeights(models)
    teacher = None
    if config.model.teacher_load is not None:
        _check_same_shape("--teacher-load", config, config.model.teacher_load)
        conversion.load_weights(models, config.model.teacher_load)
        teacher = ReferenceWeights(models)
    conversion.load_weights(models, path)
    if config.model.freeze_params:
        freeze(models, config.model.freeze_params)
    temperature = 1.0 if config.train.loss == "sft" else config.sampling.rollout_temperature
    spec = head_spec(
        layout.tp.group, layout.tp.rank, layout.tp.size, architecture.vocab_size, temperature, device.type == "cuda"
    )
    head = PolicyHead(spec, layout, config.parallel.sequence_parallel)
    state = _assemble(config, layout, device, models, architecture, head)
    state.reference, state.teacher = reference, teacher
    algorithm = config.algorithm
    if algorithm.kl_target is not None:
        state.adaptive_kl = AdaptiveKL(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    dist.barrier()
    return state, conversion


def build_critic(config: Config, layout: Layout, device: torch.device) -> TrainState:
    """The critic's state: the body of --critic-load, a value head, and an optimizer of its own.

    Raises:
        ValueError: parallel sizes or a checkpoint that do not fit the critic's model.
    """
    config = critic_config(config)
    path = config.model.hf_checkpoint
    conversion = open_conversion(config, path)
    transformer = conversion.architecture.config
    _check_shape(config, transformer, "--critic-" if config.critic_is_apart else "--")
    models = build_models(config, conversion.architecture, layout, device)
    conversion.load_weights(models, path)
    attach_value_head(models, transformer.hidden_size, device)
    head = CriticHead(layout, config.parallel.sequence_parallel)
    state = _assemble(config, layout, device, models, conversion.architecture, head)
    dist.barrier()
    return state


def _assemble(
    config: Config, layout: Layout, device: torch.device, models: list[Any], architecture: Architecture, head: TokenHead
) -> TrainState:
    """Gradient buffers, optimizer and schedule around models that have their weights."""
    args = parse_megatron_args(config.model.megatron_args)
    shares_prompts = config.train.share_prompts and layout.cp.size == 1 and prepare_shared_prompts(models)
    wrapped = wrap_ddp(models, architecture.config, args)
    optimizer = make_optimizer(config, wrapped, args)
    return TrainState(
        config=config,
        layout=layout,
        device=device,
        models=wrapped,
        optimizer=optimizer,
        scheduler=make_scheduler(config, optimizer),
        head=head,
        hidden_size=architecture.config.hidden_size,
        vocab_size=architecture.vocab_size,
        router_losses=RouterLosses(architecture.config),
        shares_prompts=shares_prompts,
    )


def _check_shape(config: Config, transformer: Any, prefix: str = "--") -> None:
    """The model must divide over the workers; Megatron's own errors are assertions deep inside.

    `prefix` begins the flags that set these sizes.
    """
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    ep = config.parallel.expert_model_parallel_size
    chunks = pp * (transformer.virtual_pipeline_model_parallel_size or 1)
    rules = [
        ("tensor-model-parallel-size", tp, "attention heads", transformer.num_attention_heads),
        ("tensor-model-parallel-size", tp, "key-value heads", transformer.num_query_groups),
        ("tensor-model-parallel-size", tp, "channels of the MLP", transformer.ffn_hidden_size),
        ("pipeline-model-parallel-size", chunks, "layers", transformer.num_layers),
    ]
    if transformer.num_moe_experts:
        rules.append(("expert-model-parallel-size", ep, "experts", transformer.num_moe_experts))
        needs_sp = tp > 1 and not config.parallel.sequence_parallel
        if needs_sp:
            raise ValueError(
                "--sequence-parallel must be on for a mixture of experts with --tensor-model-parallel-size > 1"
            )
    elif ep > 1:
        raise ValueError(f"{prefix}expert-model-parallel-size must be 1 for a model without experts, got {ep}")
    for flag, size, what, count in rules:
        if count % size:
            raise ValueError(
                f"{prefix}{flag} must divide the model's {count} {what} (largest: {math.gcd(count, size)}), got {size}"
            )


def _check_same_shape(flag: str, config: Config, path: str) -> None:
    """A model that takes turns with the policy in the same modules must have its architecture."""
    if path == config.model.hf_checkpoint:
        return
    policy, other = (
        AutoConfig.from_pretrained(p, trust_remote_code=config.model.trust_remote_code).to_dict()
        for p in (config.model.hf_checkpoint, path)
    )
    for name in sorted(policy.keys() | other.keys()):
        ours, theirs = policy.get(name), other.get(name)
        if name == FIELD:  # each folder's weights are dequantised when they are loaded
            continue
        if ours != theirs and (name not in WITHOUT_EFFECT or name == "model_type"):
            raise ValueError(
                f"{flag} must have the architecture of --hf-checkpoint, in whose modules it is computed: its {name} is "
                f"{theirs!r}, the policy's {ours!r}"
            )
