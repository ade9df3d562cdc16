"""PPO's critic: a second model with a value head, in the policy's workers or its own, trained on the returns of GAE.

before the step: values [t] ──► advantages (policy), returns = advantages before whitening + values (critic)
updates:         value_loss(V, V before the step, returns), on the same samples as the policy's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slime_rl.algorithms.value_loss import explained_variance
from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch, TokenFields
from slime_rl.trainer.gather import GlobalBatch, gather_global
from slime_rl.trainer.loss import CriticInputs
from slime_rl.trainer.shard import make_shard
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.timing import PhaseTimer
from slime_rl.trainer.token_fields import (
    given_kl_coef,
    sampled_fields,
    seconds_before,
    unpack_fields,
    with_kl_coef,
)
from slime_rl.trainer.update import StepData, over_updates, public_names, run_updates

# Named as parts of the loss are; every other number of the critic is reported under critic/.
UNDER_TRAIN = ("value_loss", "value_clipfrac", "value_mean")


def critic_config(config: Config) -> Config:
    """The configuration that the critic's model and optimizer are built from."""
    critic, optimizer = config.critic, config.optimizer
    decay = critic.critic_lr_decay_style or optimizer.lr_decay_style
    return config.with_sections(
        model=replace(config.model, hf_checkpoint=critic.critic_load or config.model.hf_checkpoint, freeze_params=()),
        parallel=config.critic_parallel,
        critic=replace(critic, critic_warmup_steps=0),  # it is the policy's that wait
        optimizer=replace(
            optimizer,
            lr=critic.critic_lr,
            min_lr=min(optimizer.min_lr, critic.critic_lr),
            lr_decay_style=decay,
            lr_warmup_updates=critic.critic_lr_warmup_updates,
            weight_decay=critic.critic_weight_decay,
            clip_grad=critic.critic_clip_grad,
        ),
    )


def critic_step(
    config: Config, critic: TrainState, step: int, batch: RolloutBatch, given: Sequence[TokenFields]
) -> dict[str, float]:
    """Every update of a critic in workers of its own, and its metrics.

    Args:
        config: the run's.
        given: the critic's values before the step and, with --kl-coef, the policy's log-probs, of all samples.

    Raises:
        ValueError: a batch that does not fit, or numbers that are missing.
        NonFiniteError: a loss or gradient is NaN or infinite.
    """
    timer = PhaseTimer(critic.device, critic.trace)
    data = StepData(config, batch, make_shard(critic, batch), step)
    timer.seconds |= seconds_before(given, of_critic=True)
    config = with_kl_coef(config, given_kl_coef(given, config))
    token_fields = sampled_fields(config, data.shard) | unpack_fields(given, batch, critic)
    with timer.phase("returns"):
        whole = gather_global(data.shard, token_fields, data.shard.num_samples, critic.layout.dp)
        weights, _ = whole.per_update(config, None)
    metrics = public_names(train_critic(config, critic, data, whole, weights, timer))
    return metrics | {f"timing_s/train/critic_{name}": seconds for name, seconds in timer.seconds.items()}


def train_critic(
    config: Config, critic: TrainState, data: StepData, whole: GlobalBatch, weights: torch.Tensor, timer: PhaseTimer
) -> dict[str, float]:
    """Every update of the critic in this step, and its metrics.

    Args:
        config: of the step; gives the returns.
        whole: the global batch with `values`, the critic's before the step.
        weights: `[T]` token weights of the global batch.
    """
    returns, own = whole.returns(config), whole.own_tokens
    values, mask = whole.tokens["values"], whole.tokens["mask"]
    inputs = CriticInputs(mask=mask[own], weights=weights[own], old_values=values[own], returns=returns[own])
    updates = run_updates(critic, data, inputs, timer)
    metrics = over_updates({name: numbers for name, numbers in updates.items() if name != "num_microbatches"})
    named = {name if name in UNDER_TRAIN else f"critic/{name}": value for name, value in metrics.items()}
    kept = returns[mask > 0]
    named["critic/returns_mean"] = float(kept.mean()) if len(kept) else 0.0
    named["critic/explained_variance"] = explained_variance(values, returns, mask)
    return named
