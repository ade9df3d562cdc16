"""What a worker trains with: one such state for the policy, and one for the critic where there is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slime_rl.algorithms.adaptive_kl import AdaptiveKL
from slime_rl.config import Config
from slime_rl.observability.trace import NO_TRACE, Trace
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.forward import TokenHead
from slime_rl.trainer.reference import ReferenceWeights
from slime_rl.trainer.router_losses import RouterLosses

if TYPE_CHECKING:
    from slime_rl.trainer.token_log import TokenLog


@dataclass
class TrainState:
    """What a training step works on. The modules and the optimizer change in place."""

    config: Config
    layout: Layout
    device: torch.device
    models: list[Any]  # DDP-wrapped chunks of this pipeline stage
    optimizer: Any
    scheduler: Any
    head: TokenHead
    hidden_size: int
    vocab_size: int
    router_losses: RouterLosses
    shares_prompts: bool  # a prompt of several samples is computed once, see trainer.shared_prompts
    reference: ReferenceWeights | None = None
    teacher: ReferenceWeights | None = None
    adaptive_kl: AdaptiveKL | None = None
    trace: Trace = NO_TRACE
    token_log: TokenLog = field(default_factory=dict)  # of the last step, see trainer.token_log

    @property
    def sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel
