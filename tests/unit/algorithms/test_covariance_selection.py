"""Which tokens clip_cov and kl_cov act on, against sorting in Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from slime_rl.algorithms.policy_losses.covariance import select_by_covariance
from slime_rl.config import Config

Make = Callable[..., Config]


def inputs(size: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    mask = (torch.rand(size, generator=generator) > 0.2).float()
    log_probs, advantages = torch.randn(2, size, generator=generator)
    return torch.where(mask > 0, log_probs, torch.nan), torch.where(mask > 0, advantages, torch.nan), mask


def covariances(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> dict[int, float]:
    kept = [i for i, m in enumerate(mask.tolist()) if m]
    lp, adv = [float(log_probs[i]) for i in kept], [float(advantages[i]) for i in kept]
    mean_lp, mean_adv = statistics.fmean(lp), statistics.fmean(adv)
    return {i: (x - mean_lp) * (a - mean_adv) for i, x, a in zip(kept, lp, adv, strict=True)}


def pick(config: Config, log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    selected = select_by_covariance(config, old_log_probs=log_probs, advantages=advantages, mask=mask)
    assert selected is not None
    return selected


@pytest.mark.parametrize("share", [1e-4, 0.02, 1.0])
def test_kl_cov_takes_the_highest_covariances(algo: Make, share: float) -> None:
    batch = inputs()
    cov = covariances(*batch)
    count = max(1, int(share * len(cov)))
    want = sorted(sorted(cov, key=lambda i: -cov[i])[:count])
    selected = pick(algo(policy_loss="kl_cov", cov_ratio=share), *batch)
    assert torch.nonzero(selected).flatten().tolist() == want


def test_clip_cov_takes_its_share_spread_within_the_bounds(algo: Make) -> None:
    batch = inputs()
    cov = covariances(*batch)
    config = algo(policy_loss="clip_cov", cov_ratio=0.02, clip_cov_lower=0.5, clip_cov_upper=1.5)
    selected = torch.nonzero(pick(config, *batch)).flatten().tolist()
    assert len(selected) == int(0.02 * len(cov))
    assert all(0.5 < cov[i] < 1.5 for i in selected)
    assert min(cov[i] for i in selected) < 0.7 < 1.2 < max(cov[i] for i in selected)
    everything = algo(policy_loss="clip_cov", cov_ratio=1.0, clip_cov_lower=0.5, clip_cov_upper=1.5)
    inside = sorted(i for i, c in cov.items() if 0.5 < c < 1.5)
    assert torch.nonzero(pick(everything, *batch)).flatten().tolist() == inside


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_does_not_depend_on_order(algo: Make, name: str) -> None:
    config = algo(policy_loss=name, cov_ratio=0.05, clip_cov_lower=0.2)
    batch = inputs()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(9))
    assert torch.equal(pick(config, *(x[order] for x in batch)), pick(config, *batch)[order])


def test_other_losses_and_empty_batches_select_nothing(algo: Make) -> None:
    log_probs, advantages, mask = inputs()
    assert select_by_covariance(algo(), old_log_probs=log_probs, advantages=advantages, mask=mask) is None
    assert not pick(algo(policy_loss="kl_cov"), log_probs, advantages, mask * 0).any()
    narrow = algo(policy_loss="clip_cov", clip_cov_lower=90.0, clip_cov_upper=91.0)
    assert not pick(narrow, log_probs, advantages, mask).any()
