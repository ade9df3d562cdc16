"""Gradient buffers, distributed optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime_rl.config import Config
from slime_rl.trainer.arguments import MegatronArgs


def wrap_ddp(models: list[Any], transformer_config: Any, args: MegatronArgs) -> list[Any]:
    """Each model chunk in Megatron's DDP: gradients in float32 buffers, reduced once per update, as sums."""
    options: dict[str, Any] = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True} | args.ddp
    ddp_config = DistributedDataParallelConfig(**options)
    wrapped = [
        DistributedDataParallel(transformer_config, ddp_config, model, disable_bucketing=i > 0)
        for i, model in enumerate(models)
    ]
    transformer_config.finalize_model_grads_func = _sum_grads
    if ddp_config.overlap_grad_reduce:
        transformer_config.no_sync_func = _one_or_all([m.no_sync for m in wrapped])
        transformer_config.grad_sync_func = _one_or_all([m.start_grad_sync for m in wrapped])
    return wrapped


def _sum_grads(models: list[Any], num_tokens: Any = None, **options: Any) -> None:
    """Megatron's last step of a backward pass, without its division by tokens: the token weights hold it already.

    It moves router biases, too, which `step` is to do: until then a dump must find the weights before the update, and
    where a number is not finite nothing must have changed.
    """
    before = [(router, router.expert_bias.clone()) for router in _routers_with_bias(models)]
    finalize_model_grads(models, None, **options)
    for router, bias in before:
        router.next_expert_bias = router.expert_bias.clone()
        router.expert_bias.copy_(bias)


def _routers_with_bias(models: list[Any]) -> list[Any]:
    modules = [module for model in models for module in model.modules()]
    return [module for module in modules if getattr(module, "expert_bias", None) is not None]


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def make_optimizer(config: Config, models: list[Any], args: MegatronArgs) -> Any:
    """AdamW over the DDP-wrapped chunks, its state split over the data-parallel workers; float32 master weights."""
    ours, is_bf16 = config.optimizer, config.model.train_dtype == "bfloat16"
    options = {
        "optimizer": "adam",
        "lr": ours.lr,
        "min_lr": ours.min_lr,
        "weight_decay": ours.weight_decay,
        "adam_beta1": ours.adam_beta1,
        "adam_beta2": ours.adam_beta2,
        "adam_eps": ours.adam_eps,
        "clip_grad": ours.clip_grad,
        "bf16": is_bf16,
        "params_dtype": torch.bfloat16 if is_bf16 else torch.float32,
        "use_distributed_optimizer": models[0].ddp_config.use_distributed_optimizer,
        "overlap_param_gather": models[0].ddp_config.overlap_param_gather,
    } | args.optimizer
    return get_megatron_optimizer(OptimizerConfig(**options), models)


def make_scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """The learning rate by optimizer updates; a policy that waits for its critic makes fewer of them."""
    ours = config.optimizer
    decay_updates = ours.lr_decay_updates or max(1, config.num_updates(config.critic.critic_warmup_steps))
    if ours.lr_decay_style == "constant":
        decay_updates = max(decay_updates, ours.lr_warmup_updates + 1)  # it has no end to fall short of
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.lr_warmup_updates,
        lr_decay_steps=decay_updates,
        lr_decay_style=ours.lr_decay_style,
        wsd_decay_steps=ours.lr_wsd_decay_updates,
        lr_wsd_decay_style=ours.lr_wsd_decay_style,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=decay_updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its own flags from the saved update count on
    )


def zero_grad(models: list[Any], optimizer: Any) -> None:
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()


def make_moments(optimizer: Any) -> None:
    """Adam's moments where no update has made them yet, as 0: a policy that waits for its critic can be saved."""
    chained = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    for adam in [one for one in chained if one is not None]:  # a worker without parameters has none
        for group in adam.param_groups:
            for p in group["params"]:
                if not adam.state[p]:
                    adam.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            group.setdefault("step", 0)


def grad_norm(optimizer: Any) -> float:
    """Norm of the summed gradients over all parameters; the same on every rank."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def step(models: list[Any], optimizer: Any, scheduler: OptimizerParamScheduler) -> float:
    """Clip, update, gather the parameters, advance the schedule; the learning rate that was used."""
    rate = learning_rate(optimizer)
    for model in models:
        _end_gathers(model)
    optimizer.step()
    for router in _routers_with_bias(models):
        router.expert_bias.copy_(router.next_expert_bias)
    for model in models:
        if model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)  # the deferred output layer has no hook that would wait for it
    scheduler.step(1)
    return rate


def _end_gathers(model: Any) -> None:
    """Wait for what --megatron-overlap-param-gather has begun and no hook has waited for: the deferred output layer's.

    While such a gather is open, `start_param_sync(force_sync=True)` waits for it and gathers nothing new.
    """
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        if group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)


def learning_rate(optimizer: Any) -> float:
    return float(next(group["lr"] for group in optimizer.param_groups if group.get("default_config", True)))
