from __future__ import annotations

import math
import re

import pytest

from slime_rl.config.config import own_flags
from slime_rl.observability.advice import Advice, advise

BALANCED = {"perf/step_s": 10.0, "timing_s/rollout": 5.0, "timing_s/train": 4.0, "rollout/staleness_max": 0.0}


def steps(count: int = 5, **metrics: float) -> list[dict[str, float]]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [{"step": i, **BALANCED, **named} for i in range(count)]


def topics(found: list[Advice]) -> list[str]:
    return [advice.topic for advice in found]


def test_a_healthy_run_gets_no_advice() -> None:
    healthy = steps(30, rollout__truncated_fraction=0.02, rollout__zero_std_groups_fraction=0.1, train__loss=0.1)
    assert advise(healthy) == []


def test_supervised_steps_are_not_told_that_engines_idle() -> None:
    supervised = [{"step": i, "perf/step_s": 10.0, "timing_s/rollout": 2.0, "timing_s/train": 7.0} for i in range(5)]
    assert advise(supervised) == []


def test_nothing_is_said_of_too_few_steps_or_unknown_metrics() -> None:
    assert advise([]) == []
    assert advise(steps(2, rollout__truncated_fraction=1.0)) == []
    assert advise([{"step": i} for i in range(20)]) == []


CASES = [
    (steps(timing_s__rollout=8.0, timing_s__train=1.0), "trainer_idle", "trainers idle 80% ", "--rollout-ahead"),
    (steps(timing_s__rollout=2.0, timing_s__train=7.0), "engines_idle", "engines idle 80% ", "--train-num-workers"),
    (steps(rollout__zero_std_groups_fraction=0.48), "equal_rewards", "48% of groups", "--dynamic-filter-path"),
    (steps(rollout__truncated_fraction=0.3), "truncated", "30% of responses", "--max-response-len"),
    (steps(train__pg_clipfrac=0.5), "clipped", "50% of tokens", "--lr"),
    (steps(train__loss=math.nan), "not_finite", "train/loss is not finite", "--lr"),
    (steps(timing_s__sync=3.0), "slow_sync", "30% of the time goes into sync", "--weight-sync"),
    (steps(timing_s__save=3.0), "slow_save", "30% of the time goes into save", "--save-interval"),
]


@pytest.mark.parametrize(("history", "topic", "words", "flag"), CASES, ids=[case[1] for case in CASES])
def test_advice_has_the_number_and_the_flag(history: list[dict[str, float]], topic: str, words: str, flag: str) -> None:
    [advice] = [found for found in advise(history) if found.topic == topic]
    assert words in advice.sentence and flag in advice.sentence


def test_evaluation_that_takes_long_is_told_from_the_whole_run() -> None:
    run_phases_s = {"start": 100.0, "evaluate": 50.0, "rollout": 25.0, "train": 25.0}
    [advice] = advise(steps(), run_phases_s=run_phases_s)
    assert advice.topic == "slow_evaluation"
    assert "50% of the time goes into evaluation" in advice.sentence and "--eval-interval" in advice.sentence
    assert advise(steps(), run_phases_s={**run_phases_s, "evaluate": 10.0}) == []


def test_every_flag_in_advice_exists() -> None:
    sentences = " ".join(found.sentence for history, *_ in CASES for found in advise(history))
    sentences += advise(growing_gap())[0].sentence
    mentioned = set(re.findall(r"--[a-z][a-z-]+", sentences))
    assert len(mentioned) > 10 and mentioned <= own_flags()


def growing_gap() -> list[dict[str, float]]:
    gaps = [0.001] * 10 + [0.004] * 10
    return [{"step": 40 + i, **BALANCED, "train/logprob_diff_mean_abs": gap} for i, gap in enumerate(gaps)]


def test_growing_log_prob_gap_is_told_with_its_start() -> None:
    [advice] = advise(growing_gap())
    assert advice.topic == "logprob_gap"
    assert "grew 4x since step 40" in advice.sentence and "--off-policy-correction" in advice.sentence


def test_gap_within_rounding_is_not_worth_a_word() -> None:
    tiny = [{"step": i, **BALANCED, "train/logprob_diff_mean_abs": 1e-7 * (i + 1)} for i in range(20)]
    assert advise(tiny) == []


def test_flag_that_is_already_on_is_not_advised() -> None:
    waiting = steps(timing_s__rollout=8.0, timing_s__train=1.0)
    assert "--rollout-ahead" not in advise(waiting, rollout_ahead=1)[0].sentence
    assert advise(steps(timing_s__rollout=2.0, timing_s__train=7.0), rollout_ahead=1) == []


def test_cause_of_equal_rewards_follows_the_reward() -> None:
    low = steps(rollout__zero_std_groups_fraction=0.9, rollout__reward_mean=0.02, rollout__reward_max=1.0)
    high = steps(rollout__zero_std_groups_fraction=0.9, rollout__reward_mean=0.98, rollout__reward_max=1.0)
    assert "too hard" in advise(low)[0].sentence and "too easy" in advise(high)[0].sentence


def test_only_recent_steps_count() -> None:
    cured = steps(30, rollout__truncated_fraction=0.9) + steps(20, rollout__truncated_fraction=0.0)
    assert topics(advise(cured)) == []
