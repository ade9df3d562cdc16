"""Numbers of a worker's response tokens without gradient, under whatever weights the model holds now."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_rl.trainer.forward import run
from slime_rl.trainer.packing import MicroBatch, make_micro_batch, make_shared_micro_batch, split_rows, token_cap
from slime_rl.trainer.shard import Shard
from slime_rl.trainer.shared_prompts import num_tokens, prompt_families
from slime_rl.trainer.state import TrainState


def make_micro_batches(state: TrainState, shard: Shard, rows: list[int]) -> list[MicroBatch]:
    """Packed micro-batches of the given rows, as many on every data-parallel worker. Collective over dp."""
    sequences, train, layout, splits = shard.sequences, state.config.train, state.layout, state.sequence_parallel
    if not state.shares_prompts:
        lengths = sequences.lengths
        units, sizes = [[row] for row in rows], [lengths[row] for row in rows]
    else:
        cap = token_cap(train, layout, splits) if train.micro_batch_size is None else 0  # with 0 every row is a unit
        units = prompt_families(rows, sequences, cap)
        sizes = [num_tokens(unit, sequences) for unit in units]
    parts = split_rows(units, sizes, train, layout, splits, state.hidden_size, state.device)
    needed = sequences, layout, splits
    if state.shares_prompts:
        return [make_shared_micro_batch(i, part, *needed) for i, part in enumerate(parts)]
    return [make_micro_batch(i, part, *needed, state.device) for i, part in enumerate(parts)]


def token_pass(state: TrainState, shard: Shard) -> Tensor:
    """`[t]` float32 in the order of the worker's samples, on every rank of its model-parallel group.

    The policy's log-probs, or the critic's values: whatever the state's token head gives first.
    """

    def keep(batch: MicroBatch, numbers: Tensor, *others: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return numbers.sum(), (batch.token_index, numbers)

    micro_batches = make_micro_batches(state, shard, list(range(len(shard.sample_ids))))
    parts = _without_recompute(state.models, lambda: run(state.models, micro_batches, keep, state.head, backward=False))
    result = torch.zeros(len(shard.mask), device=state.device)
    for index, numbers in parts:
        result[index] = numbers
    if state.layout.pp.size > 1:
        dist.broadcast(result, src=state.layout.last_stage_rank, group=state.layout.pp.group)
    return result


def _without_recompute(models: list[Any], forward: Any) -> list[Any]:
    """Recomputation is for backward passes; without dropout, eval mode changes nothing else."""
    for model in models:
        model.eval()
    parts = forward()
    for model in models:
        model.train()
    return parts
