"""Ragged batches with everything that went wrong elsewhere, and plain lists of them for the slow references.

Eleven samples: group 0 has four episodes of one sample, group 1 two episodes of which one was cut into two samples,
group 2 three equal rewards, group 3 a single sample. Tool text in the middle and at the end is masked, sample 6 is
masked wholly, and every masked entry of a token tensor is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_rl.algorithms.batch import AdvantageBatch, LossBatch

MASKS = [
    *([1, 1, 1], [1, 0, 0, 1, 1], [1, 1, 0], [1]),
    *([1, 1, 1, 1, 0, 1], [0, 1], [0, 0]),
    *([1, 1], [1, 1, 1, 0], [1]),
    [1, 1, 1, 1],
]
REWARDS = [1.0, 0.0, 0.25, 2.0, 3.0, 3.0, -1.0, 0.1, 0.1, 0.1, 4.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
ROLLOUTS = [0, 1, 2, 3, 10, 10, 11, 7, 8, 9, 20]
IDS = [i for i, mask in enumerate(MASKS) for _ in mask]
MASK = torch.tensor([float(m) for mask in MASKS for m in mask])


def tokens(seed: int, *, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[T]` normal values, NaN on masked tokens."""
    values = torch.randn(len(IDS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(MASK > 0, values * scale + shift, torch.nan).to(dtype)


def advantage_batch(**changes: Any) -> AdvantageBatch:
    fields: dict[str, Any] = {
        "rewards": torch.tensor(REWARDS),
        "group_ids": torch.tensor(GROUPS),
        "rollout_ids": torch.tensor(ROLLOUTS),
        "lengths": torch.tensor([len(mask) for mask in MASKS]),
        "mask": MASK.clone(),
        "old_log_probs": tokens(1, scale=0.3, shift=-1, dtype=torch.float32),
        "rollout_log_probs": tokens(2, scale=0.3, shift=-1, dtype=torch.float32),
        "ref_log_probs": tokens(3, scale=0.3, shift=-1, dtype=torch.float32),
        "values": tokens(4, dtype=torch.float32),
        "baseline_rewards": torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 3.0]),
    }
    return AdvantageBatch(**{**fields, **changes})


def group_batch(rewards: list[list[float]]) -> AdvantageBatch:
    """One-token samples; one inner list per group."""
    flat = [r for group in rewards for r in group]
    size = len(flat)
    return AdvantageBatch(
        rewards=torch.tensor(flat),
        group_ids=torch.tensor([i for i, group in enumerate(rewards) for _ in group]),
        rollout_ids=torch.arange(size),
        lengths=torch.ones(size, dtype=torch.int64),
        mask=torch.ones(size),
        old_log_probs=None,
        rollout_log_probs=torch.zeros(size),
        ref_log_probs=None,
        values=None,
    )


def loss_batch(seed: int = 0, *, gap: float = 0.3, **changes: Any) -> LossBatch:
    """A float64 micro-batch; `gap` is the spread between policies, with ratios on both sides of every clip."""
    behind = tokens(seed, scale=0.5, shift=-2.0)
    fields: dict[str, Any] = {
        "log_probs": behind + tokens(seed + 1, scale=gap),
        "entropy": tokens(seed + 2).abs(),
        "old_log_probs": behind,
        "rollout_log_probs": behind + tokens(seed + 3, scale=gap),
        "ref_log_probs": behind + tokens(seed + 4, scale=gap),
        "advantages": tokens(seed + 5),
        "mask": MASK.double(),
        "sample_ids": torch.tensor(IDS),
        "num_samples": len(MASKS),
        "weight_versions": torch.tensor([7 - i % 4 if m else -1 for i, m in enumerate(MASK.tolist())]),
        "version": 7,
        "teacher_log_probs": behind + tokens(seed + 6, scale=gap),
        "cov_selected": torch.arange(len(IDS)) % 5 == 0,
    }
    return LossBatch(**{**fields, **changes})


@dataclass(frozen=True)
class Token:
    """One unmasked token in plain floats, for loops."""

    index: int
    sample: int
    theta: float
    old: float
    rollout: float
    ref: float
    teacher: float
    advantage: float
    entropy: float
    version: int
    selected: bool


def unmasked(batch: LossBatch, mask: list[float] | None = None) -> list[Token]:
    """The tokens a slow reference walks over; `mask` in place of the batch's own."""
    mask = batch.mask.tolist() if mask is None else mask
    columns = {
        name: getattr(batch, name).tolist()
        for name in (
            *("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "advantages"),
            *("entropy", "weight_versions", "cov_selected", "sample_ids"),
        )
    }
    out = []
    for i, m in enumerate(mask):
        if m:
            c = {name: column[i] for name, column in columns.items()}
            assert not math.isnan(c["log_probs"])
            out.append(
                Token(
                    i,
                    c["sample_ids"],
                    *(c[k] for k in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")),
                    *(c[k] for k in ("teacher_log_probs", "advantages", "entropy", "weight_versions", "cov_selected")),
                )
            )
    return out
