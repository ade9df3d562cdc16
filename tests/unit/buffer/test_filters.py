from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from factories import make_config

from slime_rl.buffer.filters import reward_std
from slime_rl.buffer.policies import BUFFER_FILTERS, DYNAMIC_FILTERS
from slime_rl.types import Sample, Status


def group_of(*rewards: float | None, status: Status = Status.COMPLETED) -> list[Sample]:
    return [
        Sample(index=i, group_index=0, rollout_id=i, prompt="p", reward=reward, status=status)
        for i, reward in enumerate(rewards)
    ]


def test_equal_rewards_have_zero_spread_even_where_float_arithmetic_says_otherwise(tmp_path: Path) -> None:
    equal = [float(np.float32(0.1))] * 7
    nonzero_std = DYNAMIC_FILTERS.load("nonzero_std")
    config = make_config(tmp_path)
    for rewards in (equal, [0.1] * 7, [1e30] * 3):
        assert nonzero_std(config, group_of(*rewards)) == "zero_std"
        assert reward_std(rewards) == 0.0
    assert nonzero_std(config, group_of(0.1, 0.1, 0.1000001)) is None
    assert reward_std([0.0, 1.0]) == statistics.pstdev([0.0, 1.0]) == 0.5


def test_a_reward_of_zero_counts_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    nonzero_std = DYNAMIC_FILTERS.load("nonzero_std")
    assert nonzero_std(make_config(tmp_path), group_of(0.0, 1.0)) is None
    with pytest.raises(ValueError, match="1 of 2 samples have no reward"):
        nonzero_std(make_config(tmp_path), group_of(0.0, None))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0), "reward_too_low"),
        ((1.0, 1.0), "reward_too_high"),
        ((0.0, 1.0), None),
        ((0.2, 0.2), "reward_too_low"),
    ],
)
def test_reward_band_keeps_groups_in_the_middle(tmp_path: Path, rewards: tuple[float, ...], reason: str | None) -> None:
    config = make_config(tmp_path, "--reward-band", "0.2", "0.9")
    assert DYNAMIC_FILTERS.load("reward_band")(config, group_of(*rewards)) == reason


def test_groups_that_were_cut_off_altogether_can_be_dropped(tmp_path: Path) -> None:
    keep = DYNAMIC_FILTERS.load("not_all_truncated")
    config = make_config(tmp_path)
    truncated = group_of(0.0, 0.0, status=Status.TRUNCATED)
    assert keep(config, truncated) == "all_truncated"
    assert keep(config, [*truncated, *group_of(1.0)]) is None


def test_a_band_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--reward-band must be two rising numbers"):
        make_config(tmp_path, "--reward-band", "0.9", "0.2")


@pytest.mark.parametrize("point", [BUFFER_FILTERS, DYNAMIC_FILTERS], ids=lambda p: p.flag)
def test_every_built_in_loads(point: object) -> None:
    for name in point.builtins:  # type: ignore[attr-defined]
        assert callable(point.load(name))  # type: ignore[attr-defined]
