"""Forward and backward passes over micro-batches, on every pipeline schedule of Megatron.

micro-batch ──► model ──► hidden states ──► token head (last stage) ──► loss_fn ──► scalar ──► backward
                                             log-probs and entropy [T], or values [T]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from slime_rl.trainer.model import output_weight, unwrap
from slime_rl.trainer.packing import MicroBatch

# (hidden [t, 1, H] or [t/tp, 1, H], micro-batch, model) -> numbers of its response tokens, each [T] float32
TokenHead = Callable[[Tensor, MicroBatch, Any], tuple[Tensor, ...]]
# (micro-batch, *what the token head gives) -> (scalar to differentiate, what to hand back)
LossFn = Callable[..., tuple[Tensor, Any]]


def run(
    models: list[Any], micro_batches: list[MicroBatch], loss_fn: LossFn, token_head: TokenHead, *, backward: bool
) -> list[Any]:
    """Pass every micro-batch through the model; with `backward`, gradients are summed into the DDP buffers.

    Returns what loss_fn handed back for each micro-batch on the last pipeline stage, and an empty list on the others.
    """

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        output = model(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed)
        return output, partial(to_loss, batch, model)

    def to_loss(batch: MicroBatch, model: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        loss, result = loss_fn(batch, *token_head(hidden, batch, model))
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


@dataclass(frozen=True)
class PolicyHead:
    """Log-probs and entropy of the response tokens."""

    spec: HeadSpec
    layout: Layout
    sequence_parallel: bool

    def __call__(self, hidden: Tensor, batch: MicroBatch, model: Any) -> tuple[Tensor, Tensor]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        elif self.spec.tp_size > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        weight = output_weight(model)
        picked = hidden[:, 0].index_select(0, batch.predict_at).to(weight.dtype)
        own = torch.stack(log_probs_and_entropy(picked, weight, batch.targets, self.spec))
        everything = _over_context_parallel(own, batch, self.layout)
        return everything[0], everything[1]


@dataclass(frozen=True)
class CriticHead:
    """Values of the response tokens: what is expected before each of them is sampled."""

    layout: Layout
    sequence_parallel: bool

    def __call__(self, hidden: Tensor, batch: MicroBatch, model: Any) -> tuple[Tensor]:
        if self.sequence_parallel:  # every tensor-parallel worker computes the same values, so gradients are not summed
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        picked = hidden[:, 0].index_select(0, batch.predict_at)
        own = unwrap(model).output_layer(picked)
        return (_over_context_parallel(own[None], batch, self.layout)[0],)


def _over_context_parallel(own: Tensor, batch: MicroBatch, layout: Layout) -> Tensor:
    """`own [x, K]` of this worker -> `[x, T]` of all context-parallel workers.

    Every one of them gets all T and computes the same loss; in the backward pass each takes the gradient of the tokens
    it owns, so that the sum of parameter gradients over the workers is the gradient of that one loss.
    """
    if layout.cp.size == 1:
        return own
    everything = own.new_zeros(len(own), len(batch.token_index)).index_copy(1, batch.owned, own)
    return reduce_from_tensor_model_parallel_region(everything, group=layout.cp.group)
