"""Off-policy corrections against loops over samples: weights, mask and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithm_batches import IDS, MASK, Token, loss_batch, unmasked

from slime_rl.algorithms.compose import compose_loss
from slime_rl.algorithms.metrics import finish_metrics, token_metrics
from slime_rl.algorithms.off_policy import kept_by_rules
from slime_rl.algorithms.policy_losses.clip import ppo_clip
from slime_rl.algorithms.registry import OFF_POLICY
from slime_rl.config import Config

Make = Callable[..., Config]
LOW, HIGH = 0.8, 1.25


def by_sample(rows: list[Token], reduce: Callable[[list[float]], float]) -> dict[int, float]:
    logs: dict[int, list[float]] = {}
    for t in rows:
        logs.setdefault(t.sample, []).append(t.old - t.rollout)
    return {sample: reduce(values) for sample, values in logs.items()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def expected(name: str, rows: list[Token]) -> list[tuple[float, bool]]:
    """(weight, kept) of each unmasked token."""
    token = [math.exp(t.old - t.rollout) for t in rows]
    total, average = by_sample(rows, sum), by_sample(rows, mean)
    seq, geo = [math.exp(total[t.sample]) for t in rows], [math.exp(average[t.sample]) for t in rows]
    drift: dict[int, list[float]] = {}
    for t in rows:
        drift.setdefault(t.sample, []).append(t.rollout - t.theta)
    table: dict[str, list[tuple[float, bool]]] = {
        "none": [(1.0, True) for _ in rows],
        "tis_token": [(min(r, HIGH), True) for r in token],
        "tis_sequence": [(min(r, HIGH), True) for r in seq],
        "mis_token": [(r, r <= HIGH) for r in token],
        "mis_sequence": [(r, r <= HIGH) for r in seq],
        "icepop": [(r, LOW <= r <= HIGH) for r in token],
        "geometric_rejection": [(1.0, LOW <= r <= HIGH) for r in geo],
        "sequence_rejection": [(1.0, LOW <= r <= HIGH) for r in seq],
        "opsm": [(1.0, not (t.advantage < 0 and mean(drift[t.sample]) > 0.05)) for t in rows],
    }
    return table[name]


@pytest.mark.parametrize("name", sorted(OFF_POLICY.builtins))
def test_weights_and_mask_equal_loop(algo: Make, name: str) -> None:
    batch = loss_batch()
    config = algo(off_policy_upper=HIGH, off_policy_lower=LOW, opsm_delta=0.05)
    output = OFF_POLICY.load(name)(config, batch)
    rows = unmasked(batch)
    want = expected(name, rows)
    assert [float(output.weights[t.index]) for t in rows] == pytest.approx([w for w, _ in want], rel=1e-9)
    kept = {t.index for t, (_, keep) in zip(rows, want, strict=True) if keep}
    assert output.mask.tolist() == [float(i in kept) for i in range(len(IDS))]
    assert not output.weights.requires_grad
    assert torch.isfinite(output.weights).all()
    if name not in ("none", "tis_token", "tis_sequence"):
        assert 0 < len(kept) < len(rows)  # the case has both sides


def slow_rules(rule: str, rows: list[Token], sample: int) -> Callable[[Token], bool]:
    logs = [t.old - t.rollout for t in rows if t.sample == sample]
    inside = [LOW <= math.exp(x) <= HIGH for x in logs]
    k2, k3 = mean([x * x / 2 for x in logs]), mean([math.exp(x) - 1 - x for x in logs])
    return {
        "token": lambda t: LOW <= math.exp(t.old - t.rollout) <= HIGH,
        "sequence": lambda t: LOW <= math.exp(sum(logs)) <= HIGH,
        "geometric": lambda t: LOW <= math.exp(mean(logs)) <= HIGH,
        "sequence_max": lambda t: all(inside),
        "mean_k2": lambda t: k2 <= 0.03,
        "mean_k3": lambda t: k3 <= 0.03,
    }[rule]


@pytest.mark.parametrize(
    "rules",
    [("token",), ("sequence",), ("geometric",), ("sequence_max",), ("mean_k2",), ("mean_k3",), ("token", "mean_k3")],
)
def test_rejection_rules_are_anded(algo: Make, rules: tuple[str, ...]) -> None:
    batch = loss_batch(40, gap=0.2)
    config = algo(
        off_policy_rejection=rules,
        off_policy_rejection_upper=HIGH,
        off_policy_rejection_lower=LOW,
        off_policy_rejection_kl=0.03,
    )
    rows = unmasked(batch)
    want = [all(slow_rules(rule, rows, t.sample)(t) for rule in rules) for t in rows]
    assert [bool(kept_by_rules(config, batch)[t.index]) for t in rows] == want
    assert len(set(want)) == 2


def test_metrics_of_the_gap_equal_loops(algo: Make) -> None:
    batch = loss_batch()
    config = algo(off_policy_upper=HIGH)
    output = compose_loss(config, batch, ppo_clip, OFF_POLICY.load("mis_token"))
    rows = unmasked(batch)
    weights = MASK.double() / MASK.sum()
    parts = {k: float(v) for k, v in token_metrics(output.metrics, weights).items()}
    metrics = finish_metrics(parts)
    ratios = [math.exp(t.old - t.rollout) for t in rows]
    want: dict[str, Any] = {
        "off_policy/ratio": mean(ratios),
        "off_policy/ratio_max": max(ratios),
        "off_policy/kl_k1": mean([t.rollout - t.old for t in rows]),
        "off_policy/kl_k3": mean([r - 1 - math.log(r) for r in ratios]),
        "off_policy/chi2": mean([r * r - 1 for r in ratios]),
        "off_policy/ess": sum(ratios) ** 2 / (len(rows) * sum(r * r for r in ratios)),
        "off_policy/rejected": mean([float(r > HIGH) for r in ratios]),
        "off_policy/weight": mean(ratios),
        "off_policy/perplexity_ratio": mean(
            [by_sample(rows, lambda x: math.exp(-mean(x)))[t.sample] for t in rows],
        ),
        "train_rollout_logprob_abs_diff": mean([abs(t.old - t.rollout) for t in rows]),
    }
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-9)


def test_equal_log_probs_mean_no_correction(algo: Make) -> None:
    base = loss_batch()
    batch = loss_batch(rollout_log_probs=base.old_log_probs)
    for name in set(OFF_POLICY.builtins) - {"opsm"}:
        output = OFF_POLICY.load(name)(algo(), batch)
        assert torch.equal(output.weights, torch.ones_like(batch.mask))
        assert torch.equal(output.mask, batch.mask)
