"""One data-parallel worker's share of a RolloutBatch, as the tensors that training uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_rl.algorithms.overlong import overlong_filter
from slime_rl.data.batches import RolloutBatch
from slime_rl.trainer.sequences import Sequences
from slime_rl.trainer.state import TrainState


@dataclass(frozen=True)
class Shard:
    """n samples with t response tokens, one sample after the other; on the worker's device but for `sequences`."""

    sequences: Sequences
    sample_ids: Tensor  # [n] int64
    group_ids: Tensor  # [n] int64
    rollout_ids: Tensor  # [n] int64
    update_ids: Tensor  # [n] int64
    response_lengths: Tensor  # [n] int64
    total_lengths: Tensor  # [n] int64
    sample_fields: dict[str, Tensor]  # [n] float32: rewards, and baseline_rewards where the batch has them
    mask: Tensor  # [t] float32, truncated responses left out with --overlong-filter
    rollout_log_probs: Tensor  # [t] float32
    weight_versions: Tensor  # [t] int64
    teacher_log_probs: Tensor | None  # [t] float32
    step: int
    weight_version: int
    num_samples: int  # of the global batch


def make_shard(state: TrainState, batch: RolloutBatch) -> Shard:
    """Check the batch and move what training needs to the worker's device.

    Raises:
        ValueError: a prompt or response without tokens, a token that is outside the vocabulary, a mask that is neither
            0 nor 1, or an update that the step does not have.
    """
    config, device = state.config, state.device
    prompts, responses = batch.dense("prompt_lengths").cpu(), batch.response_lengths
    if len(batch) == 0 or int(prompts.min()) < 1 or int(responses.min()) < 1:
        raise ValueError("every data-parallel worker needs samples with at least one prompt and one response token")
    _check_values(batch, state.vocab_size, config.train.num_updates_per_rollout)
    sequences = Sequences(
        tokens=batch.ragged("tokens").values.cpu(),
        offsets=batch.ragged("tokens").offsets,
        prompt_lengths=prompts.tolist(),
        response_offsets=batch.ragged("loss_mask").offsets,
    )
    dense = {name: batch.dense(name).to(device) for name in ("sample_ids", "group_ids", "rollout_ids", "update_ids")}
    sample_fields = {n: batch.dense(n).float().to(device) for n in ("rewards", "baseline_rewards") if n in batch}
    mask = batch.ragged("loss_mask").values.to(device)
    if config.algorithm.overlong_filter:
        owners = torch.arange(len(batch)).repeat_interleave(responses).to(device)
        mask = overlong_filter(config, mask, owners, batch.dense("truncated").to(device))
    teacher = batch.ragged("teacher_log_probs").values.to(device) if "teacher_log_probs" in batch else None
    return Shard(
        sequences=sequences,
        **dense,
        response_lengths=responses.to(device),
        total_lengths=batch.total_lengths.to(device),
        sample_fields=sample_fields,
        mask=mask,
        rollout_log_probs=batch.ragged("rollout_log_probs").values.to(device),
        weight_versions=batch.ragged("weight_versions").values.long().to(device),
        teacher_log_probs=teacher,
        step=batch.meta_info["step"],
        weight_version=batch.meta_info["weight_version"],
        num_samples=batch.meta_info["num_samples"],
    )


def _check_values(batch: RolloutBatch, vocab_size: int, num_updates: int) -> None:
    """Numbers that are inside no range here would be trained on as if they were others."""
    tokens, masks, updates = batch.ragged("tokens"), batch.ragged("loss_mask"), batch.dense("update_ids").cpu()
    sample_ids = batch.dense("sample_ids").tolist()

    def refuse(rule: str, row: int, value: float) -> None:
        raise ValueError(f"step {batch.meta_info['step']}, sample {sample_ids[row]}: {rule}, got {value:g}")

    for values, offsets, bad, rule in (
        (tokens.values, tokens.offsets, (tokens.values < 0) | (tokens.values >= vocab_size), _token_rule(vocab_size)),
        (masks.values, masks.offsets, (masks.values != 0) & (masks.values != 1), "loss_mask must be 0 or 1"),
    ):
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            row = int(torch.searchsorted(offsets.cpu(), at, right=True)) - 1
            refuse(rule, row, float(values[at]))
    outside = (updates < 0) | (updates >= num_updates)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        refuse(f"update_ids must be 0..{num_updates - 1} (--num-updates-per-rollout)", row, int(updates[row]))


def _token_rule(vocab_size: int) -> str:
    return f"tokens must be 0..{vocab_size - 1}, the vocabulary of config.json"
