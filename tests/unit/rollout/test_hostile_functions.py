"""Generate and reward functions that get something wrong: named with their flag, or their group is dropped."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from test_interruption import OVER_SAMPLING, Steps, swallow_once

from slime_rl.config import Config
from slime_rl.rollout.in_flight import GRACE_S
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status

SHORT = {"length_of": lambda ids: 20}


def finish(sample: Sample) -> Sample:
    sample.append_tokens([5, 6], log_probs=[-0.5, -0.5], versions=[0, 0])
    sample.status = Status.COMPLETED
    return sample


async def status_of_text(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    finish(sample).status = "completed"  # type: ignore[assignment]
    return sample


async def response_of_none(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    finish(sample).response = None  # type: ignore[assignment]
    return sample


async def mask_of_none(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    finish(sample).loss_mask = None  # type: ignore[assignment]
    return sample


async def tokens_in_a_tuple(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    finish(sample).tokens = tuple(sample.tokens)  # type: ignore[assignment]
    return sample


async def the_same_twice(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return [finish(sample), sample]


shared: dict[int, Sample] = {}


async def one_for_all(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As a cache by prompt does."""
    if sample.index == 0:
        shared.clear()
    if sample.group_index not in shared:
        shared[sample.group_index] = finish(sample)
    return shared[sample.group_index]


async def numbers_by_group(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Draws of one episode would be compared with nothing."""
    return finish(dataclasses.replace(sample, rollout_id=sample.group_index))


async def same_index(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return finish(dataclasses.replace(sample, index=0))


async def other_group(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return finish(dataclasses.replace(sample, group_index=99))


async def number_of_text(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return finish(dataclasses.replace(sample, rollout_id="x"))  # type: ignore[arg-type]


async def forgets_the_status(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    finish(sample).status = Status.PENDING
    return sample


async def keeps_a_lock(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.metadata["lock"] = threading.Lock()
    return finish(sample)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("status_of_text", "status of sample 0 must be a Status, got 'completed'"),
        ("response_of_none", "response of sample 0 must be a str, got None"),
        ("mask_of_none", "loss_mask of sample 0 must be a list, got None"),
        ("tokens_in_a_tuple", r"tokens of sample 0 must be a list, got \("),
        ("the_same_twice", "returned one Sample object twice for sample 0"),
        ("one_for_all", "returned one Sample object for samples 0 and 1; each needs its own"),
        (
            "numbers_by_group",
            "returned rollout_id 0 for samples 0 and 1; only what came out of one of them may share it",
        ),
        ("same_index", "returned index 0 for samples 0 and 1; only what came out of one of them may share it"),
        ("other_group", "group_index of sample 0 must stay 0, got 99"),
        ("number_of_text", "rollout_id of sample 0 must be an int, got 'x'"),
        ("forgets_the_status", "sample 0 is still pending; set its status, such as COMPLETED"),
        ("keeps_a_lock", r"group 0: .*lock.* so the buffer cannot keep it"),
    ],
)
def test_what_is_no_sample_to_train_on_is_named_or_dropped(tmp_path: Path, name: str, message: str) -> None:
    flags = ("--generate-function-path", f"test_hostile_functions:{name}", "--max-sampling-rounds", "2")
    with pytest.raises(ValueError, match=message):
        Steps(tmp_path, *flags).run(1)
    with pytest.raises(ValueError, match=r"4 dropped for error_ValueError\. The generate or reward function raises"):
        Steps(tmp_path, *flags, "--rollout-error", "drop").run(1)


def test_why_groups_are_dropped_is_logged_once_for_each_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--generate-function-path", "test_hostile_functions:mask_of_none", "--rollout-error", "drop")
    with pytest.raises(ValueError, match="max-sampling-rounds"):
        Steps(tmp_path, *flags).run(1)
    (record,) = [record for record in caplog.records if record.name == "slime_rl.rollout.groups"]
    assert "loss_mask of sample 0 must be a list" in record.getMessage()


async def score_of_text(config: Config, group: list[Sample]) -> list[Any]:
    return ["1"] * len(group)


async def score_beyond_floats(config: Config, group: list[Sample]) -> list[Any]:
    return [10**400] * len(group)


@pytest.mark.parametrize("name", ["score_of_text", "score_beyond_floats"])
def test_rewards_that_are_no_numbers_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"--reward-function-path test_hostile_functions:{name} must return finite"):
        Steps(tmp_path, "--reward-function-path", f"test_hostile_functions:{name}", **SHORT).run(1)


async def takes_all_for_whole(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Looks at no finish reason."""
    answer = await current_runtime().engine.generate(sample.tokens, sampling_params)
    sample.append_tokens(answer.tokens, log_probs=answer.log_probs, versions=answer.versions)
    sample.status = Status.COMPLETED
    return sample


@pytest.mark.parametrize("partial", [False, True])
def test_a_response_that_was_cut_is_never_taken_for_a_whole_one(tmp_path: Path, partial: bool) -> None:
    """Also where one slot lets samples wait until they are interrupted, and have no token at all."""
    flags = ("--generate-function-path", "test_hostile_functions:takes_all_for_whole", *OVER_SAMPLING)
    steps = Steps(tmp_path, *flags, *(["--partial-rollout"] if partial else []))
    steps.slots = 4
    steps.run(4)
    assert steps.client.num_aborted > 0
    lengths = {g.group_index: [s.response_length for s in g.samples] for o in steps.outputs for g in o.groups}
    assert all(found == [20, 20] or (group == 0 and min(found) >= 312) for group, found in lengths.items())


closed: list[int] = []


async def cleans_up(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index != 0:
        return finish(sample)
    try:
        await asyncio.sleep(1e9)
    finally:
        await asyncio.sleep(5)
        closed.append(sample.index)
    return sample


def test_cleaning_up_after_a_cancellation_is_not_broken_off(tmp_path: Path) -> None:
    closed.clear()
    flags = ("--generate-function-path", "test_hostile_functions:cleans_up", *OVER_SAMPLING)
    steps = Steps(tmp_path, *flags).run(1)
    assert sorted(closed) == [0, 1] and GRACE_S + 5 <= steps.seconds[0] < GRACE_S + 7


async def deaf_judge(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 1:
        await swallow_once()
    return [1.0] * len(group)


def test_surplus_that_takes_no_notice_of_its_cancellation_is_an_error_too(tmp_path: Path) -> None:
    flags = ("--reward-function-path", "test_hostile_functions:deaf_judge", *OVER_SAMPLING)
    with pytest.raises(TimeoutError, match="group 1 goes on though it was cancelled 10 s ago"):
        Steps(tmp_path, *flags, **SHORT).run(1)


async def late_samples_only(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.sleep(1e9)
    return sample


def test_a_run_of_late_groups_is_told_what_to_raise(tmp_path: Path) -> None:
    flags = ("--generate-function-path", "test_hostile_functions:late_samples_only", "--sample-deadline-s", "5")
    with pytest.raises(ValueError, match=r"dropped for late_samples\. Groups take too long: .*--sample-deadline-s"):
        Steps(tmp_path, *flags, "--max-group-attempts", "1", "--max-sampling-rounds", "2").run(1)
