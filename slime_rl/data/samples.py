"""Samples as a DataProto and back, without loss. One row is one sample.

Shape letters: N samples, L tokens of a sample, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_rl.data.proto import DataProto, object_array
from slime_rl.data.ragged import Ragged
from slime_rl.types import Sample, Status

# Log-probs stay float64, so that a sample comes back equal; token ids, versions and masks fit smaller integers.
_RAGGED = {
    "tokens": torch.int32,  # [L]
    "loss_mask": torch.int8,  # [R]
    "rollout_log_probs": torch.float64,  # [R]
    "weight_versions": torch.int32,  # [R]
}
_INTEGERS = ("index", "group_index", "rollout_id", "prompt_length")
_OBJECTS = ("prompt", "label", "metadata", "response", "reward_info")


def from_samples(samples: Sequence[Sample]) -> DataProto:
    """Fields of `Sample` by name: tokens, masks, log-probs and versions ragged, numbers dense `[N]`, the rest objects.

    `reward` is float64 with NaN where `has_reward` is false: 0.0 and NaN are values, a missing reward is not.
    """
    tensors: dict[str, Tensor | Ragged] = {
        name: Ragged.from_list([getattr(s, name) for s in samples], dtype) for name, dtype in _RAGGED.items()
    }
    for name in _INTEGERS:
        tensors[name] = torch.tensor([getattr(s, name) for s in samples], dtype=torch.int64)
    rewards = [float("nan") if s.reward is None else s.reward for s in samples]
    tensors["reward"] = torch.tensor(rewards, dtype=torch.float64)
    tensors["has_reward"] = torch.tensor([s.reward is not None for s in samples], dtype=torch.bool)
    objects = {name: object_array([getattr(s, name) for s in samples]) for name in _OBJECTS}
    objects["status"] = object_array([s.status.value for s in samples])
    return DataProto(tensors, objects)


def to_samples(batch: DataProto) -> list[Sample]:
    """The samples that `from_samples` was given."""
    columns: dict[str, list[Any]] = {}
    for name in _RAGGED:
        value = batch.tensors[name]
        columns[name] = value.to_list() if isinstance(value, Ragged) else value.tolist()
    for name in (*_INTEGERS, "reward", "has_reward"):
        columns[name] = batch[name].tolist()
    for name in (*_OBJECTS, "status"):
        columns[name] = list(batch.non_tensors[name])
    has_reward = columns.pop("has_reward")
    columns["reward"] = [r if has else None for r, has in zip(columns["reward"], has_reward, strict=True)]
    columns["status"] = [Status(status) for status in columns["status"]]
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
