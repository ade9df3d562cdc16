from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from slime_rl.config.checks import check, check_model_folder, check_not_negative


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Critic: the value model of PPO, there with --advantage-estimator gae.

    It shares the train workers and their parallel layout with the policy, and the optimizer settings that are not here.
    """

    critic_load: str | None = None
    """Hugging Face folder of the critic's first weights (any size and architecture); --hf-checkpoint when not given."""

    critic_lr: float = 1e-5
    """Peak learning rate of the critic."""

    critic_lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] | None = None
    """Shape of the critic's schedule; --lr-decay-style when not given."""

    critic_lr_warmup_updates: int = 0
    """Updates over which the critic's rate rises from 0."""

    critic_weight_decay: float = 0.0
    """Decoupled weight decay of the critic."""

    critic_clip_grad: float = 1.0
    """Largest gradient norm of the critic; 0 turns clipping off."""

    critic_warmup_steps: int = 0
    """First steps of the run in which only the critic trains and the policy stays as it is."""

    def __post_init__(self) -> None:
        check_not_negative(
            critic_lr=self.critic_lr,
            critic_lr_warmup_updates=self.critic_lr_warmup_updates,
            critic_weight_decay=self.critic_weight_decay,
            critic_clip_grad=self.critic_clip_grad,
            critic_warmup_steps=self.critic_warmup_steps,
        )
        if self.critic_load is not None:
            check_model_folder("--critic-load", self.critic_load)

    def check_used(self, estimator: str) -> None:
        """Refuse flags of a critic that the run does not have."""
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if estimator != "gae" and given:
            flag = "--" + given[0].replace("_", "-")
            check(False, flag, f"needs --advantage-estimator gae (it is {estimator})", getattr(self, given[0]))
