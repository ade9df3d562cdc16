"""Forward and backward passes over micro-batches, on every pipeline schedule of Megatron.

micro-batch ──► model ──► hidden states ──► log-probs and entropy [T] (last stage) ──► loss_fn ──► scalar ──► backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.head import HeadSpec, log_probs_and_entropy
from slime_rl.trainer.model import output_weight
from slime_rl.trainer.packing import MicroBatch

# (micro-batch, log_probs [T], entropy [T]) -> (scalar to differentiate, what to hand back)
LossFn = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, Any]]


def run(
    models: list[Any],
    micro_batches: list[MicroBatch],
    loss_fn: LossFn,
    head: HeadSpec,
    layout: Layout,
    *,
    sequence_parallel: bool,
    backward: bool,
) -> list[Any]:
    """Pass every micro-batch through the model; with `backward`, gradients are summed into the DDP buffers.

    Returns what loss_fn handed back for each micro-batch on the last pipeline stage, and an empty list on the others.
    """

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        output = model(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed)
        return output, partial(to_loss, batch, model)

    def to_loss(batch: MicroBatch, model: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        log_probs, entropy = token_statistics(hidden, batch, model, head, layout, sequence_parallel)
        loss, result = loss_fn(batch, log_probs, entropy)
        return loss, torch.ones((), dtype=torch.int, device=loss.device), result

    iterators = [iter(micro_batches) for _ in models]
    with torch.set_grad_enabled(backward):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.input_ids.size(1) for batch in micro_batches),
            micro_batch_size=1,
            forward_only=not backward,
        )


def token_statistics(
    hidden: Tensor, batch: MicroBatch, model: Any, head: HeadSpec, layout: Layout, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy `[T]` float32 of all response tokens, from `hidden [t, 1, H]` (t/tp if sequence parallel).

    Every context-parallel worker gets all T and computes the same loss; in the backward pass each takes the gradient of
    the tokens it owns, so that the sum of parameter gradients over the workers is the gradient of that one loss.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    elif head.tp_size > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    weight = output_weight(model)
    picked = hidden[:, 0].index_select(0, batch.predict_at).to(weight.dtype)
    own = torch.stack(log_probs_and_entropy(picked, weight, batch.targets, head))
    if layout.cp.size == 1:
        return own[0], own[1]
    everything = own.new_zeros(2, len(batch.token_index)).index_copy(1, batch.owned, own)
    everything = reduce_from_tensor_model_parallel_region(everything, group=layout.cp.group)
    return everything[0], everything[1]
