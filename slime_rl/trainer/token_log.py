"""What training saw of the samples that are shown (--log-samples), token by token: --log-token-training.

first pass over a token in an update ──► log-probs [t] ──┐
mask, advantages, old log-probs of the step's inputs ────┴─► lists per sample, which the driver puts into samples.jsonl

Nothing is gathered: each data-parallel worker has the numbers of its own samples, and they do not depend on the split.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime_rl.config import Config
from slime_rl.observability.tracker import MAX_LOGGED_TOKENS
from slime_rl.trainer.distributed import Layout
from slime_rl.trainer.forward import LossFn
from slime_rl.trainer.loss import MicroBatchResult, PolicyInputs, needs_old_pass
from slime_rl.trainer.packing import MicroBatch
from slime_rl.trainer.shard import Shard

TokenLog = dict[int, dict[str, list[float | None]]]  # sample_id -> kind of number -> one per response token
DIGITS = 6  # a ratio of two log-probs is then right to 1e-6, far below what engine and trainer are apart


def open_log(config: Config, layout: Layout, shard: Shard) -> Tensor | None:
    """`[t]` float32 for the log-probs that updates see, NaN until then; None where this worker has none to give."""
    if not config.logging.logs_token_training or not layout.is_last_stage:
        return None
    if layout.tp.rank > 0 or layout.cp.rank > 0:  # they compute the same numbers as the first of them
        return None
    return torch.full_like(shard.mask, math.nan)


def watched(loss_fn: LossFn, seen: Tensor) -> LossFn:
    """`loss_fn`, with the policy's log-probs that it gets noted in `seen [t]`."""

    def loss(micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, MicroBatchResult]:
        seen[micro_batch.token_index] = log_probs.detach()
        return loss_fn(micro_batch, log_probs, entropy)

    return loss


def close_log(config: Config, shard: Shard, inputs: PolicyInputs, seen: Tensor | None) -> TokenLog:
    """The numbers of this worker's samples that are shown; empty without `seen`."""
    if seen is None:
        return {}
    fields = {"train_log_probs": seen, "train_mask": inputs.mask}
    if config.train.loss != "sft":
        fields["advantages"] = inputs.advantages
    if needs_old_pass(config) and inputs.old_log_probs is not None:
        fields["old_log_probs"] = inputs.old_log_probs
    ends = shard.response_lengths.cumsum(0).tolist()
    found: TokenLog = {}
    for row, (sample_id, end) in enumerate(zip(shard.sample_ids.tolist(), ends, strict=True)):
        if sample_id < config.logging.log_samples:
            start = ends[row - 1] if row else 0
            cut = slice(start, min(end, start + MAX_LOGGED_TOKENS))
            found[sample_id] = {name: _as_list(values[cut]) for name, values in fields.items()}
    return found


def _as_list(values: Tensor) -> list[float | None]:
    return [round(value, DIGITS) if math.isfinite(value) else None for value in values.tolist()]
