"""PPO's critic: a second model with a value head in the same workers, trained towards the returns of GAE.

before the step: values [t] ──► advantages (policy), returns = advantages before whitening + values (critic)
updates:         value_loss(V, V before the step, returns), on the same samples and splits as the policy's
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slime_rl.algorithms.value_loss import explained_variance
from slime_rl.config import Config
from slime_rl.trainer.gather import GlobalBatch
from slime_rl.trainer.loss import CriticInputs
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.timing import PhaseTimer
from slime_rl.trainer.update import StepData, mean_of, run_updates

# Named as parts of the loss are; every other number of the critic is reported under critic/.
UNDER_TRAIN = ("value_loss", "value_clipfrac", "value_mean")


def critic_config(config: Config) -> Config:
    """The configuration that the critic's model and optimizer are built from."""
    critic, optimizer = config.critic, config.optimizer
    decay = critic.critic_lr_decay_style or optimizer.lr_decay_style
    return config.with_sections(
        model=replace(config.model, hf_checkpoint=critic.critic_load or config.model.hf_checkpoint, freeze_params=()),
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
    metrics = {name: mean_of(numbers) for name, numbers in updates.items() if name != "num_microbatches"}
    named = {name if name in UNDER_TRAIN else f"critic/{name}": value for name, value in metrics.items()}
    kept = returns[mask > 0]
    named["critic/returns_mean"] = float(kept.mean()) if len(kept) else 0.0
    named["critic/explained_variance"] = explained_variance(values, returns, mask)
    return named
