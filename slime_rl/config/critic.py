from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from slime_rl.config.checks import check, check_model_folder, check_not_negative, check_positive
from slime_rl.config.cluster import ParallelConfig
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Critic: the value model of PPO, there with --advantage-estimator gae.

    It has the policy's optimizer settings where they are not here.
    """

    critic_num_workers: int = 0
    """Workers of a train group of the critic's own, on devices beside those of --train-num-workers, where it trains
    while the policy does; 0 puts it into the policy's train workers, with their parallel sizes."""

    critic_tensor_model_parallel_size: int | None = None
    """Workers of the critic's own group that share every matrix, with sequence parallelism; the policy's number when
    not given."""

    critic_pipeline_model_parallel_size: int | None = None
    """Pipeline stages in the critic's own group; the policy's number when not given."""

    critic_context_parallel_size: int | None = None
    """Workers of the critic's own group that share every sequence; the policy's number when not given."""

    critic_expert_model_parallel_size: int | None = None
    """Workers of the critic's own group that its experts are spread over; the policy's number when not given."""

    critic_load: str | None = None
    """Hugging Face folder of the critic's first weights (any size and architecture); --hf-checkpoint when not given."""

    critic_lr: float = 1e-5
    """Peak learning rate of the critic."""

    critic_lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] | None = None
    """Shape of the critic's schedule; --lr-decay-style when not given."""

    critic_lr_warmup_updates: int = flag(0, aliases=("--critic-lr-warmup-iters",))
    """Updates over which the critic's rate rises from 0."""

    critic_weight_decay: float = 0.0
    """Decoupled weight decay of the critic."""

    critic_clip_grad: float = 1.0
    """Largest gradient norm of the critic; 0 turns clipping off."""

    critic_warmup_steps: int = flag(0, aliases=("--num-critic-only-steps",))
    """First steps of the run in which only the critic trains and the policy stays as it is."""

    def __post_init__(self) -> None:
        check_positive(**self._own_sizes)
        for name, size in self._own_sizes.items():
            wanted = "needs --critic-num-workers: beside the policy the critic has the policy's"
            check(size is None or self.critic_num_workers > 0, "--" + name.replace("_", "-"), wanted, size)
        check_not_negative(
            critic_num_workers=self.critic_num_workers,
            critic_lr=self.critic_lr,
            critic_lr_warmup_updates=self.critic_lr_warmup_updates,
            critic_weight_decay=self.critic_weight_decay,
            critic_clip_grad=self.critic_clip_grad,
            critic_warmup_steps=self.critic_warmup_steps,
        )
        if self.critic_load is not None:
            check_model_folder("--critic-load", self.critic_load)

    @property
    def _own_sizes(self) -> dict[str, int | None]:
        return {name: value for name, value in vars(self).items() if name.endswith("_parallel_size")}

    def parallel(self, policy: ParallelConfig) -> ParallelConfig:
        """Parallel sizes of the critic."""
        if self.critic_num_workers == 0:
            return policy
        sizes = {
            name.removeprefix("critic_"): getattr(policy, name.removeprefix("critic_")) if own is None else own
            for name, own in self._own_sizes.items()
        }
        return ParallelConfig(**sizes, sequence_parallel=sizes["tensor_model_parallel_size"] > 1)

    def check_unused(self) -> None:
        """Refuse flags of a critic, in a run that has none."""
        for field in fields(self):
            name, value = "--" + field.name.replace("_", "-"), getattr(self, field.name)
            check(value == field.default, name, "needs --advantage-estimator gae and --loss policy", value)
