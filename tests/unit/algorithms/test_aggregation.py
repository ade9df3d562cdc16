"""Token weights against the loop definition of every aggregation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from algorithm_batches import GROUPS, IDS, MASK, ROLLOUTS

from slime_rl.algorithms.aggregation import token_weights
from slime_rl.algorithms.metrics import finish_metrics, token_metrics
from slime_rl.config import Config

Make = Callable[..., Config]


def weights_of(config: Config, mask: torch.Tensor = MASK) -> torch.Tensor:
    ids = {"sample_ids": torch.tensor(IDS), "rollout_ids": torch.tensor(ROLLOUTS), "group_ids": torch.tensor(GROUPS)}
    return token_weights(config, mask=mask, **ids)


def slow_loss(mode: str, losses: list[float], length: float) -> float:
    owner = GROUPS if mode.startswith("prompt") else ROLLOUTS
    by_owner: dict[int, list[float]] = {}
    for loss, sample, m in zip(losses, IDS, MASK.tolist(), strict=True):
        if m:
            by_owner.setdefault(owner[sample], []).append(loss)
    if mode == "token-mean":
        flat = [v for values in by_owner.values() for v in values]
        return sum(flat) / len(flat)
    reduce = {
        "seq-mean-token-mean": lambda v: sum(v) / len(v),
        "seq-mean-token-sum": sum,
        "seq-mean-token-sum-norm": lambda v: sum(v) / length,
        "prompt-mean-token-mean": lambda v: sum(v) / len(v),
    }[mode]
    return sum(reduce(v) for v in by_owner.values()) / len(by_owner)


@pytest.mark.parametrize("norm", [None, 7])
@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"],
)
def test_weighted_sum_equals_loop(algo: Make, mode: str, norm: int | None) -> None:
    losses = torch.randn(len(IDS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = weights_of(algo(loss_aggregation=mode, loss_norm_length=norm))
    assert weights.dtype == torch.float32
    want = slow_loss(mode, losses.tolist(), norm or 10)  # --max-response-len is 10 here
    assert float((weights.double() * losses).sum()) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"],
)
def test_fully_masked_sample_adds_nothing(algo: Make, mode: str) -> None:
    config = algo(loss_aggregation=mode)
    keep = [s for s in range(11) if s != 6]  # sample 6 is an episode of its own, wholly masked
    positions = torch.tensor([t for t, i in enumerate(IDS) if i != 6])
    without = token_weights(
        config,
        mask=MASK[positions],
        sample_ids=torch.tensor([keep.index(i) for i in IDS if i != 6]),
        rollout_ids=torch.tensor([ROLLOUTS[s] for s in keep]),
        group_ids=torch.tensor([GROUPS[s] for s in keep]),
    )
    assert torch.equal(weights_of(config)[positions], without)


def test_samples_of_one_episode_are_one_sequence(algo: Make) -> None:
    weights = weights_of(algo(loss_aggregation="seq-mean-token-mean")).tolist()
    episode = [w for w, i in zip(weights, IDS, strict=True) if i in (4, 5)]
    # nine episodes have unmasked tokens (sample 6 has none); this one has six of them
    assert sorted(set(episode)) == pytest.approx([0.0, 1 / (9 * 6)])
    assert sum(weights) == pytest.approx(1.0, rel=1e-6)


def test_nothing_unmasked_gives_zeros(algo: Make) -> None:
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean-token-mean"):
        weights = weights_of(algo(loss_aggregation=mode), torch.zeros(len(IDS)))
        assert torch.equal(weights, torch.zeros(len(IDS)))
    parts = {k: float(v) for k, v in token_metrics({"pg_clipfrac": torch.ones(2)}, torch.zeros(2)).items()}
    assert finish_metrics(parts) == {"pg_clipfrac": 0.0}


def test_metrics_are_averages_except_losses_and_maxima() -> None:
    weights = torch.tensor([0.5, 1.5, 0.0])
    values = torch.tensor([2.0, 4.0, float("nan")])
    parts = token_metrics({"pg_loss": values, "entropy": values, "x_max": values}, weights)
    finished = finish_metrics({k: float(v) for k, v in parts.items()})
    assert finished == {"pg_loss": 7.0, "entropy": 3.5, "x_max": 4.0}
