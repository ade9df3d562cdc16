from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_config

from slime_rl.algorithms.advantages.group import STD_EPS, grpo
from slime_rl.algorithms.aggregation import token_weights
from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.buffer.filters import completed, distinct, filter_samples
from slime_rl.buffer.packed import PackedGroups
from slime_rl.buffer.policies import SAMPLE_FILTERS
from slime_rl.config import Config
from slime_rl.data.batches import rollout_batch_from_groups
from slime_rl.observability.drops import DropMetrics
from slime_rl.types import Group, Sample, Status


def make_group(number: int, responses: list[list[int]], rewards: list[float], cut: tuple[int, ...] = ()) -> Group:
    samples = []
    for i, (tokens, reward) in enumerate(zip(responses, rewards, strict=True)):
        index = 10 * number + i
        sample = Sample(index=index, group_index=number, rollout_id=index, prompt="p", reward=reward)
        sample.set_prompt_tokens([1])
        sample.append_tokens(tokens, log_probs=[-1.0] * len(tokens), versions=[0] * len(tokens))
        sample.status = Status.TRUNCATED if i in cut else Status.COMPLETED
        samples.append(sample)
    return Group(group_index=number, source_index=number, epoch=0, samples=samples)


def test_advantages_and_denominators_are_those_of_the_samples_that_are_left(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--sample-filter-path", "completed", "--loss-aggregation", "token-mean")
    first = make_group(0, [[5, 6], [5], [7, 7, 7], [8]], [1.0, 0.0, 0.0, 9.0], cut=(3,))
    second = make_group(1, [[5, 6, 7, 8]], [1.0])
    assert filter_samples(config, completed, first) == (None, 1)
    assert filter_samples(config, completed, second) == (None, 0)
    assert first.left_out == {"truncated": 1} and [s.index for s in first.samples] == [0, 1, 2]
    batch = rollout_batch_from_groups([first, second], 0, 0)
    assert batch.meta_info["num_samples"] == 4
    mask = batch.ragged("loss_mask").values
    advantages = grpo(
        config,
        AdvantageBatch(
            rewards=batch.dense("rewards"),
            group_ids=batch.dense("group_ids"),
            rollout_ids=batch.dense("rollout_ids"),
            lengths=batch.response_lengths,
            mask=mask,
            old_log_probs=None,
            rollout_log_probs=batch.ragged("rollout_log_probs").values,
            ref_log_probs=None,
            values=None,
        ),
    )
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2) + STD_EPS  # of rewards 1, 0, 0
    right, wrong = 2 / 3 / std, -1 / 3 / std
    assert advantages.tolist() == pytest.approx([right] * 2 + [wrong] * 4 + [0.0] * 4)
    owners = torch.arange(4).repeat_interleave(batch.response_lengths)
    ids = {name: batch.dense(name) for name in ("rollout_ids", "group_ids")}
    assert token_weights(config, mask=mask, sample_ids=owners, **ids).tolist() == pytest.approx([1 / 10] * 10)


def test_of_repeated_responses_the_first_trains(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--sample-filter-path", "distinct")
    group = make_group(0, [[5, 6], [5], [5, 6], [5, 6]], [1.0, 0.0, 1.0, 1.0])
    assert filter_samples(config, distinct, group) == (None, 4)
    assert [sample.index for sample in group.samples] == [0, 1] and group.left_out == {"repeated": 2}
    assert PackedGroups.pack([group]).unpack([0]) == [group]  # the count survives a checkpoint


def test_a_group_without_a_sample_left_is_dropped_for_the_reason(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--sample-filter-path", "completed")
    group = make_group(0, [[5], [6]], [1.0, 0.0], cut=(0, 1))
    assert filter_samples(config, completed, group) == ("truncated", 2)
    assert filter_samples(config, lambda config, group: "all", group) == ("all", 2)
    assert filter_samples(config, lambda config, group: ["a", "b"], group) == ("no_sample_left", 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (True, "must return None, a reason, or a list of them, got True"),
        ([None, 1], "must return None, a reason, or a list of them"),
        (["late"], "must return one entry per sample, 2, got 1"),
    ],
)
def test_an_answer_that_is_none_names_the_flag(tmp_path: Path, answer: Any, message: str) -> None:
    config = make_config(tmp_path, "--sample-filter-path", "my.filters:f")
    with pytest.raises(ValueError, match=f"--sample-filter-path my.filters:f {message}"):
        filter_samples(config, lambda config, group: answer, make_group(0, [[5], [6]], [1.0, 0.0]))


def test_built_ins_load_and_a_group_filter_fits_too() -> None:
    for name in SAMPLE_FILTERS.builtins:
        assert callable(SAMPLE_FILTERS.load(name))
    assert SAMPLE_FILTERS.load(f"{__name__}:no_short_ones") is no_short_ones


def no_short_ones(config: Config, group: list[Sample]) -> str | None:
    return None


def test_a_step_reports_what_did_not_train_since_the_one_before() -> None:
    group = make_group(0, [[5], [6], [7]], [1.0, 0.0, 0.0])
    group.leave_out({0: "late", 2: "late"})
    drops = DropMetrics()
    drops.start_from({"dropped": 3, "dropped/zero_std": 3})
    counts = {"dropped": 6, "dropped/zero_std": 4, "dropped/over_age": 2}
    assert drops.metrics(counts, [group]) == {
        "rollout/groups_dropped/zero_std": 1.0,
        "rollout/groups_dropped/over_age": 2.0,
        "rollout/samples_left_out/late": 2.0,
    }
    assert drops.metrics(counts, []) == {}
