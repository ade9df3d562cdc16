from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config

from plugins.filters.too_easy import solved_over, too_easy
from slime_rl.buffer.policies import DYNAMIC_FILTERS
from slime_rl.types import Sample


def group_of(rewards: list[float | None]) -> list[Sample]:
    return [Sample(index=i, group_index=0, rollout_id=i, prompt="p", reward=r) for i, r in enumerate(rewards)]


def test_it_loads_as_a_plugin() -> None:
    assert DYNAMIC_FILTERS.load("plugins.filters.too_easy:too_easy") is too_easy


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0] * 5, "too_easy"),
        ([1.0, 1.0, 1.0, 1.0, 0.9], None),  # 0.8 is not over 0.8, and 0.9 is not solved
        ([0.0] * 5, None),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], "too_easy"),
        ([None], None),
    ],
)
def test_groups_are_dropped_by_their_share_of_solved_samples(
    tmp_path: Path, rewards: list[float | None], reason: str | None
) -> None:
    assert too_easy(make_config(tmp_path), group_of(rewards)) == reason


def test_a_share_that_drops_everything_or_nothing_is_refused() -> None:
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"a share in \[0, 1\), got"):
            solved_over(share)
