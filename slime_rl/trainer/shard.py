"""One data-parallel worker's share of a RolloutBatch, as the tensors that training uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_rl.algorithms.overlong import overlong_filter
from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch
from slime_rl.trainer.sequences import Sequences


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


def make_shard(config: Config, batch: RolloutBatch, device: torch.device) -> Shard:
    """Check the batch and move what training needs to `device`.

    Raises:
        ValueError: a prompt or response without tokens.
    """
    prompts, responses = batch.dense("prompt_lengths").cpu(), batch.response_lengths
    if len(batch) == 0 or int(prompts.min()) < 1 or int(responses.min()) < 1:
        raise ValueError("every data-parallel worker needs samples with at least one prompt and one response token")
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
