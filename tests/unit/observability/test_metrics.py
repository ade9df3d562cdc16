from __future__ import annotations

import itertools
from typing import Any

import pytest

from slime_rl.observability.metrics import METRICS, find_metric, phase_of, reward_value, summarise_samples
from slime_rl.types import Sample, Status

numbers = itertools.count()


def make_sample(
    reward: Any, length: int = 2, group: int = 0, status: Status = Status.COMPLETED, version: int = 0
) -> Sample:
    number = next(numbers)
    sample = Sample(index=number, group_index=group, rollout_id=number, prompt="p", reward=reward, status=status)
    sample.set_prompt_tokens([1])
    sample.append_tokens([2] * length, log_probs=[-0.1] * length, versions=[version] * length)
    return sample


def test_rewards_lengths_and_truncation_of_finished_samples() -> None:
    samples = [
        make_sample(1.0, length=2),
        make_sample(0.0, length=4, status=Status.TRUNCATED),
        make_sample(1.0, length=6, group=1),
        make_sample(1.0, length=8, group=1),
        make_sample(9.0, length=99, group=2, status=Status.FAILED),
        make_sample(None, length=99, group=2, status=Status.ABORTED),
    ]
    metrics = summarise_samples(samples, seconds=4.0)
    assert metrics == pytest.approx(
        {
            "rollout/reward_mean": 0.75,
            "rollout/reward_std": (3 / 16) ** 0.5,
            "rollout/reward_max": 1.0,
            "rollout/reward_min": 0.0,
            "rollout/response_length_mean": 5.0,
            "rollout/response_length_max": 8.0,
            "rollout/response_length_p10": 2.0,
            "rollout/response_length_p25": 4.0,
            "rollout/response_length_p50": 6.0,
            "rollout/response_length_p75": 8.0,
            "rollout/response_length_p90": 8.0,
            "rollout/truncated_fraction": 0.25,
            "rollout/zero_std_groups_fraction": 0.5,
            "rollout/tokens_per_s": 5.0,
        }
    )


def test_zero_is_a_reward_and_none_is_not() -> None:
    metrics = summarise_samples([make_sample(0.0), make_sample(None), make_sample(0.0)])
    assert metrics["rollout/reward_mean"] == 0.0
    assert metrics["rollout/zero_std_groups_fraction"] == 1.0
    unscored = summarise_samples([make_sample(None)])
    assert "rollout/reward_mean" not in unscored and unscored["rollout/response_length_mean"] == 2.0


def test_dictionary_rewards_count_by_their_score() -> None:
    metrics = summarise_samples([make_sample({"score": 0.5, "why": "half"}), make_sample({"why": "no score"})])
    assert metrics["rollout/reward_mean"] == 0.5


def test_equal_rewards_have_no_spread_even_in_floating_point() -> None:
    metrics = summarise_samples([make_sample(0.1) for _ in range(7)])
    assert metrics["rollout/zero_std_groups_fraction"] == 1.0


def test_groups_of_one_sample_do_not_count_as_without_spread() -> None:
    assert "rollout/zero_std_groups_fraction" not in summarise_samples([make_sample(1.0)])
    mixed = [make_sample(1.0), make_sample(0.0, group=1), make_sample(1.0, group=1)]
    assert summarise_samples(mixed)["rollout/zero_std_groups_fraction"] == 0.0


def test_no_finished_sample_gives_no_metrics() -> None:
    assert summarise_samples([]) == {}
    assert summarise_samples([make_sample(1.0, status=Status.FAILED)]) == {}


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (0.0, 0.0),
        (1, 1.0),
        (True, 1.0),
        (None, None),
        ("1", None),
        (float("nan"), None),
        ({"score": 2}, 2.0),
        ({}, None),
    ],
)
def test_reward_value(reward: Any, value: float | None) -> None:
    assert reward_value(reward) == value


def test_every_computed_metric_is_documented_and_every_name_is_unique() -> None:
    samples = [make_sample(1.0), make_sample(0.0)]
    assert all(find_metric(name) for name in summarise_samples(samples, seconds=1.0))
    names = [metric.name for metric in METRICS]
    assert sorted(set(names)) == sorted(names)
    assert all(metric.unit and metric.reduction and metric.meaning for metric in METRICS)


def test_placeholders_stand_for_one_part_of_a_name() -> None:
    found = find_metric("timing_s/train")
    assert found is not None and found.name == "timing_s/<phase>"
    assert find_metric("eval/gsm8k/accuracy") is not None
    assert find_metric("eval/a/b/accuracy") is None
    assert find_metric("train/losses") is None


def test_parts_of_a_phase_are_not_phases() -> None:
    assert phase_of("timing_s/train") == "train"
    assert phase_of("timing_s/train/optimizer") is None
    assert phase_of("perf/step_s") is None
