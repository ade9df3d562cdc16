"""Group estimators against loops over episodes in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from algorithm_batches import GROUPS, IDS, MASK, MASKS, REWARDS, ROLLOUTS, advantage_batch, group_batch

from slime_rl.algorithms.advantages import group
from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.config import Config

Make = Callable[..., Config]


def episode_table(batch: AdvantageBatch, kl: dict[int, float] | None = None) -> dict[int, dict[int, tuple[float, int]]]:
    """group -> rollout_id -> (mean reward of its samples minus its KL, trainable tokens)."""
    table: dict[int, dict[int, tuple[float, int]]] = {}
    rewards = batch.rewards.double().tolist()
    for rollout in sorted(set(ROLLOUTS)):
        members = [i for i, r in enumerate(ROLLOUTS) if r == rollout]
        reward = sum(rewards[i] for i in members) / len(members) - (kl or {}).get(rollout, 0.0)
        table.setdefault(GROUPS[members[0]], {})[rollout] = (reward, sum(sum(MASKS[i]) for i in members))
    return table


def on_tokens(per_episode: dict[int, float]) -> list[float]:
    return [per_episode[ROLLOUTS[i]] * m for i, m in zip(IDS, MASK.tolist(), strict=True)]


def slow(batch: AdvantageBatch, rule: Callable[[list[tuple[float, int]]], list[float]]) -> list[float]:
    values: dict[int, float] = {}
    for episodes in episode_table(batch).values():
        values.update(zip(episodes, rule(list(episodes.values())), strict=True))
    return on_tokens(values)


def spread(rs: list[float]) -> float:
    return statistics.stdev(rs) if len(rs) > 1 else 0.0


def slow_grpo(use_std: bool) -> Callable[[list[tuple[float, int]]], list[float]]:
    def rule(episodes: list[tuple[float, int]]) -> list[float]:
        rs = [r for r, _ in episodes]
        mean = sum(rs) / len(rs)
        return [(r - mean) / (spread(rs) + 1e-6 if use_std else 1.0) for r in rs]

    return rule


def slow_rloo(episodes: list[tuple[float, int]]) -> list[float]:
    rs = [r for r, _ in episodes]
    if len(rs) == 1:
        return [0.0]
    return [r - sum(rs[:i] + rs[i + 1 :]) / (len(rs) - 1) for i, r in enumerate(rs)]


def slow_opo(episodes: list[tuple[float, int]]) -> list[float]:
    total = sum(n for _, n in episodes)
    baseline = sum(r * n for r, n in episodes) / total
    return [r - baseline for r, _ in episodes]


def slow_passk(use_std: bool) -> Callable[[list[tuple[float, int]]], list[float]]:
    def rule(episodes: list[tuple[float, int]]) -> list[float]:
        rs = [r for r, _ in episodes]
        if len(rs) == 1:
            return [0.0]
        second, best = sorted(rs)[-2:]
        scale = spread(rs) + 1e-6 if use_std else 1.0
        return [(best - second) / scale if r == best else 0.0 for r in rs]

    return rule


@pytest.mark.parametrize(
    ("name", "fields", "rule"),
    [
        ("grpo", {}, slow_grpo(True)),
        ("grpo", {"grpo_std_normalization": False}, slow_grpo(False)),
        ("rloo", {}, slow_rloo),
        ("opo", {}, slow_opo),
        ("grpo_passk", {}, slow_passk(True)),
        ("grpo_passk", {"grpo_std_normalization": False}, slow_passk(False)),
    ],
)
def test_estimator_equals_loop_over_episodes(algo: Make, name: str, fields: dict, rule: Callable) -> None:
    batch = advantage_batch()
    advantages = getattr(group, name)(algo(**fields), batch)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(slow(batch, rule), rel=1e-6, abs=1e-9)


def test_gpg_scales_by_the_share_of_episodes_with_a_signal(algo: Make) -> None:
    batch = advantage_batch()
    table = episode_table(batch)
    total = sum(len(e) for e in table.values())
    with_signal = sum(len(e) for e in table.values() if len({r for r, _ in e.values()}) > 1)
    assert (total, with_signal) == (10, 6)
    want = [a * total / with_signal for a in slow(batch, slow_grpo(False))]
    assert group.gpg(algo(), batch).tolist() == pytest.approx(want, rel=1e-6)


def test_reinforce_plus_plus_baseline_whitens_over_trainable_tokens(algo: Make) -> None:
    batch = advantage_batch()
    raw = slow(batch, slow_grpo(False))
    chosen = [a for a, m in zip(raw, MASK.tolist(), strict=True) if m]
    mean, std = statistics.fmean(chosen), math.sqrt(statistics.variance(chosen) + 1e-8)
    want = [(a - mean) / std * m for a, m in zip(raw, MASK.tolist(), strict=True)]
    assert group.reinforce_plus_plus_baseline(algo(), batch).tolist() == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert group.grpo(algo(grpo_std_normalization=False, normalize_advantages=True), batch).tolist() == pytest.approx(
        want, rel=1e-5, abs=1e-7
    )


ALL = ["grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rewards", [[[0.1] * 7], [[0.1] * 7, [1 / 3] * 5, [-2.7] * 3], [[5.0]], [[1e-3] * 1000]])
def test_equal_rewards_have_exactly_zero_advantage(algo: Make, name: str, rewards: list[list[float]]) -> None:
    advantages = getattr(group, name)(algo(), group_batch(rewards))
    assert torch.equal(advantages, torch.zeros_like(advantages))


@pytest.mark.parametrize("name", [n for n in ALL if n != "reinforce_plus_plus_baseline"])
def test_groups_of_unequal_size_do_not_mix(algo: Make, name: str) -> None:
    function, config = getattr(group, name), algo()
    groups = [[1.0, 0.0, 0.0, 2.0], [5.0, 5.0, 5.0], [0.0, 1.0, 0.5, 0.2], [9.0]]
    together = function(config, group_batch(groups)).tolist()
    assert together[4:7] == [0.0] * 3
    assert together[11] == 0.0
    scale = 12 / 8 if name == "gpg" else 1.0
    assert together[:4] == pytest.approx([scale * a for a in function(config, group_batch(groups[:1])).tolist()])
    assert together[7:11] == pytest.approx([scale * a for a in function(config, group_batch(groups[2:3])).tolist()])


def test_passk_gives_nothing_when_two_share_the_best_reward(algo: Make) -> None:
    assert group.grpo_passk(algo(), group_batch([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])).tolist() == pytest.approx(
        [0, 0, 0, 0, 0, 1 / (statistics.stdev([0, 0, 1]) + 1e-6)]
    )


def test_masked_tokens_get_zero_and_no_nan(algo: Make) -> None:
    for name in ALL:
        advantages = getattr(group, name)(algo(kl_coef=0.1), advantage_batch())
        assert torch.isfinite(advantages).all()
        assert torch.equal(advantages[MASK == 0], torch.zeros(int((MASK == 0).sum())))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_is_summed_over_the_episode_and_taken_off_its_reward(algo: Make, kind: str) -> None:
    batch = advantage_batch()
    formulas = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x, "abs": abs}
    assert batch.old_log_probs is not None and batch.ref_log_probs is not None
    kl: dict[int, float] = {}
    rows = zip(IDS, MASK.tolist(), batch.old_log_probs.tolist(), batch.ref_log_probs.tolist(), strict=True)
    for i, m, old, ref in rows:
        if m:
            kl[ROLLOUTS[i]] = kl.get(ROLLOUTS[i], 0.0) + 0.05 * formulas[kind](old - ref)
    values: dict[int, float] = {}
    for episodes in episode_table(batch, kl).values():
        mean = statistics.fmean([r for r, _ in episodes.values()])
        values.update({rollout: r - mean for rollout, (r, _) in episodes.items()})
    config = algo(kl_coef=0.05, kl_reward_type=kind, grpo_std_normalization=False)
    assert group.grpo(config, batch).tolist() == pytest.approx(on_tokens(values), rel=1e-5, abs=1e-7)


def test_order_of_samples_does_not_matter(algo: Make) -> None:
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(5))
    batch = group_batch([REWARDS])
    batch = AdvantageBatch(**{**vars(batch), "group_ids": torch.tensor(GROUPS), "rollout_ids": torch.tensor(ROLLOUTS)})
    fields = {k: v[order] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    for name in ALL:
        function = getattr(group, name)
        shuffled = function(algo(), AdvantageBatch(**{**vars(batch), **fields}))
        assert shuffled.tolist() == pytest.approx(function(algo(), batch)[order].tolist(), rel=1e-6, abs=1e-7)


def test_bad_batches_are_named(algo: Make) -> None:
    with pytest.raises(ValueError, match=r"rewards must be finite; samples \[1\] have \[nan\]"):
        group.grpo(algo(), group_batch([[1.0, math.nan]]))
    mixed = advantage_batch(rollout_ids=torch.zeros(len(GROUPS), dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one rollout_id must belong to one group; rollout_ids \[0\]"):
        group.grpo(algo(), mixed)
    with pytest.raises(ValueError, match=r"--kl-coef 0.1 needs ref_log_probs"):
        group.grpo(algo(kl_coef=0.1), advantage_batch(ref_log_probs=None))


def test_overlong_penalty_enters_the_rewards(algo: Make) -> None:
    batch = group_batch([[1.0, 1.0]])
    batch = AdvantageBatch(**{**vars(batch), "lengths": torch.tensor([8, 10]), "mask": torch.ones(18)})
    advantages = group.grpo(algo(overlong_buffer_len=4, grpo_std_normalization=False), batch)
    assert advantages.tolist() == pytest.approx([0.25] * 8 + [-0.25] * 10)
