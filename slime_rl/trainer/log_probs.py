"""Log-probs of a worker's response tokens without gradient, under whatever weights the model holds now."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.forward import run
from slime_rl.trainer.head import HeadSpec
from slime_rl.trainer.packing import MicroBatch


def response_log_probs(
    models: list[Any],
    micro_batches: list[MicroBatch],
    num_tokens: int,
    head: HeadSpec,
    layout: Layout,
    *,
    sequence_parallel: bool,
    device: torch.device,
) -> Tensor:
    """`[t]` float32 in the order of the worker's samples, on every rank of its model-parallel group.

    Tokens of samples that are in no micro-batch are 0.
    """

    def keep(batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return log_probs.sum(), (batch.token_index, log_probs)

    for model in models:
        model.eval()  # recomputation is for backward passes; without dropout nothing else changes
    parts = run(models, micro_batches, keep, head, layout, sequence_parallel=sequence_parallel, backward=False)
    for model in models:
        model.train()
    result = torch.zeros(num_tokens, device=device)
    for index, log_probs in parts:
        result[index] = log_probs
    if layout.pp.size > 1:
        dist.broadcast(result, src=layout.last_stage_rank, group=layout.pp.group)
    return result
