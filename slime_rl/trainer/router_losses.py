"""Router losses of a mixture of experts, as means over the tokens of an optimizer update.

Megatron multiplies them by the tokens of the micro-batch and leaves it to its last step to divide the gradients by the
tokens of the update. Here token weights hold every denominator and nothing is divided there, so the coefficients are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.packing import MicroBatch

COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


class RouterLosses:
    """The coefficients of a model, which its routers read from `transformer` in every pass."""

    def __init__(self, transformer: Any) -> None:
        given = {name: getattr(transformer, name) for name in COEFFICIENTS} if transformer.num_moe_experts else {}
        self._transformer = transformer
        self._given = {name: value for name, value in given.items() if value}

    def weigh(self, batches: list[MicroBatch], layout: Layout, sequence_parallel: bool, device: torch.device) -> None:
        """Make the coming passes add coefficient x mean over the update's tokens. Collective over the dp workers.

        The load of experts is that of a micro-batch, which weighs as many as it has tokens.
        """
        if not self._given:
            return
        tokens = torch.tensor(sum(batch.input_ids.numel() for batch in batches), device=device)
        dist.all_reduce(tokens, group=layout.dp.group)
        on_this_worker = int(tokens) / (layout.tp.size if sequence_parallel else 1)  # as a router counts them
        for name, value in self._given.items():
            parts = [part / on_this_worker for part in value] if isinstance(value, list) else value / on_this_worker
            setattr(self._transformer, name, parts)
