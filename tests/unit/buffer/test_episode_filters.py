"""Filters, rankings and metrics see rewards as advantages compare them: by episode, and within the roles of a game."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.buffer.filters import distinct, nonzero_std, reward_band, summarise
from slime_rl.data.episodes import num_attempts
from slime_rl.observability.metrics import summarise_samples
from slime_rl.types import Group, Sample, Status

STRIDE = 1 << 40  # between the roles of an episode


def sample(index: int, reward: float, role: str = "", prompt: int = 1) -> Sample:
    return Sample(
        index=index,
        group_index=0,
        rollout_id=index + STRIDE * (role == "second"),
        prompt="p",
        metadata={"agent": {"role": role}},
        tokens=[prompt, 7, 8],
        prompt_length=1,
        loss_mask=[1, 1],
        rollout_log_probs=[-1.0, -1.0],
        weight_versions=[0, 0],
        reward=reward,
        status=Status.COMPLETED,
    )


def game(*results: float) -> list[Sample]:
    """Both sides of zero-sum games; a result is what the first side gets."""
    return [sample(i, sign * r, role) for i, r in enumerate(results) for sign, role in ((1, "first"), (-1, "second"))]


@pytest.mark.parametrize(
    ("group", "reason", "spread"),
    [
        (game(1.0, 1.0, 1.0), "zero_std", 0.0),
        (game(1.0, -1.0), None, 1.0),
        ([sample(0, 1.0), sample(0, 0.0), sample(1, 0.5)], "zero_std", 0.0),
        ([sample(0, 0.1), sample(0, 0.1), sample(0, 0.1), sample(1, 0.1)], "zero_std", 0.0),
        ([sample(0, 1.0), sample(0, 1.0), sample(1, 0.0)], None, 0.5),
    ],
)
def test_what_teaches_nothing_is_told(group: list[Sample], reason: str | None, spread: float) -> None:
    config: Any = None
    assert nonzero_std(config, group) == reason
    assert summarise(Group(group_index=0, source_index=0, epoch=0, samples=group)).reward_std == spread
    assert summarise_samples(group)["rollout/zero_std_groups_fraction"] == float(reason is not None)


def test_an_episode_of_many_samples_counts_once(tmp_path: Path) -> None:
    group = [*(sample(0, 1.0) for _ in range(9)), sample(1, 0.0)]
    assert summarise(Group(group_index=0, source_index=0, epoch=0, samples=group)).reward_mean == 0.5
    band = make_config(tmp_path, "--reward-band", "0.2", "0.8")
    assert reward_band(band, group) is None
    assert reward_band(band, group[:9]) == "reward_too_high"
    assert reward_band(make_config(tmp_path), game(0.5, 0.25)) is None  # of the first side
    assert num_attempts(group) == 2 and num_attempts(game(1.0, 1.0, 1.0)) == 3
    assert "rollout/zero_std_groups_fraction" not in summarise_samples(group[:9]), "nothing to compare it with"


def test_the_same_words_to_another_prompt_are_no_repetition() -> None:
    config: Any = None
    group = [sample(0, 1.0, prompt=1), sample(0, 1.0, prompt=2), sample(1, 1.0, prompt=1)]
    assert distinct(config, group) == [None, None, "repeated"]


def test_what_own_functions_tell_of_an_episode_may_be_a_part() -> None:
    told = sample(0, 1.0)
    told.metadata["agent"] = {"reward": 1.0, "num_turns": 3}
    odd = sample(1, 1.0)
    odd.metadata["agent"] = {"num_turns": None, "num_tool_calls": "two", "role": ["x"]}
    metrics = summarise_samples([told, odd])
    assert metrics["rollout/num_turns_mean"] == 3.0 and "rollout/tool_calls_mean" not in metrics
