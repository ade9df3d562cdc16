from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_config
from scripted_engine import answer, scripted_engine

from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.groups import GroupRunner, set_rewards
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.types import Group, Sample, Status


async def length_reward(config: Any, group: list[Sample]) -> list[float]:
    return [float(s.response_length) for s in group]


async def broken_reward(config: Any, group: list[Sample]) -> list[float]:
    return [1 / 0 for _ in group]


async def two_args_short(config: Any) -> list[float]:
    return []


def sync_reward(config: Any, group: list[Sample]) -> list[float]:
    return []


def make_group(size: int = 2) -> Group:
    samples = [
        Sample(index=i, group_index=0, rollout_id=i, prompt="p", tokens=[1, 2], prompt_length=2) for i in range(size)
    ]
    return Group(group_index=0, source_index=0, epoch=0, samples=samples)


def run_group(config: Any, group: Group, reply: Any) -> str | None:
    async def go() -> str | None:
        async with scripted_engine(reply) as (url, _), EngineClient(url, max_in_flight=8, timeout_s=60) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=None)):
                return await GroupRunner(config).run(group, {"max_new_tokens": 4})

    return asyncio.run(go())


def test_group_gets_tokens_versions_and_rewards(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--reward-function-path", "test_groups:length_reward")
    group = make_group()
    assert run_group(config, group, lambda body: answer([5, 6, 2], "xy", version="4")) is None
    for sample in group.samples:
        assert sample.tokens == [1, 2, 5, 6, 2] and sample.loss_mask == [1, 1, 1]
        assert sample.weight_versions == [4, 4, 4] and sample.reward == 3.0 and sample.status is Status.COMPLETED


def test_length_stop_is_truncated(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--reward-function-path", "test_groups:length_reward")
    group = make_group(1)
    run_group(config, group, lambda body: answer([5], reason="length"))
    assert group.samples[0].status is Status.TRUNCATED


def test_reward_that_raises_names_flag_error_and_line(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--reward-function-path", "test_groups:broken_reward")
    with pytest.raises(ValueError, match=r"test_groups:broken_reward raised ZeroDivisionError.*test_groups\.py:\d+"):
        run_group(config, make_group(), lambda body: answer([5]))


async def leaving(config: Any, group: list[Sample]) -> list[float]:
    sys.exit(3)


async def interrupting(config: Any, group: list[Sample]) -> list[float]:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "error"), [("leaving", "SystemExit: 3"), ("interrupting", "KeyboardInterrupt: ")])
def test_a_reward_that_would_end_the_event_loop_is_an_error_like_others(tmp_path: Path, name: str, error: str) -> None:
    config = make_config(tmp_path, "--reward-function-path", f"test_groups:{name}")
    with pytest.raises(ValueError, match=rf"test_groups:{name} raised {error} at .*test_groups\.py:\d+, for group 0"):
        run_group(config, make_group(), lambda body: answer([5]))


async def own_value_error(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise ValueError("invalid literal")


def dropping_by_number(config: Any, group: list[Sample]) -> Any:
    return 3


def filter_that_raises(config: Any, group: list[Sample]) -> str | None:
    raise KeyError("score")


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--generate-function-path", "own_value_error", "raised ValueError: invalid literal at "),
        ("--dynamic-filter-path", "dropping_by_number", "must return None, which keeps the group, or a reason, got 3"),
        ("--dynamic-filter-path", "filter_that_raises", r"raised KeyError: 'score' at .*test_groups\.py:\d+"),
        ("--sample-filter-path", "filter_that_raises", r"raised KeyError: 'score' at .*test_groups\.py:\d+"),
    ],
)
def test_every_function_of_the_user_is_named_when_it_fails(tmp_path: Path, flag: str, name: str, message: str) -> None:
    config = make_config(tmp_path, "--reward-function-path", "test_groups:length_reward", flag, f"test_groups:{name}")
    with pytest.raises(ValueError, match=f"{flag} test_groups:{name} {message}"):
        run_group(config, make_group(), lambda body: answer([5]))


def test_reward_that_raises_can_drop_the_group(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--reward-function-path", "test_groups:broken_reward", "--rollout-error", "drop")
    assert run_group(config, make_group(), lambda body: answer([5])) == "error_ValueError"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two_args_short", r"called as \(config, group\)"),
        ("sync_reward", "must be `async def`"),
        ("absent", "has no 'absent'"),
    ],
)
def test_reward_of_wrong_shape_fails_before_anything_runs(tmp_path: Path, name: str, message: str) -> None:
    config = make_config(tmp_path, "--reward-function-path", f"test_groups:{name}")
    with pytest.raises(ValueError, match=message):
        GroupRunner(config)


async def raising(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise KeyError("no such tool")


async def text_alone(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return "a response"


async def text_among_samples(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return [sample, None]


async def nothing(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return []


async def tokens_without_mask(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens += [5, 6]
    sample.status = Status.COMPLETED
    return sample


async def log_prob_of_nan(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.append_tokens([5, 6], log_probs=[-0.5, float("nan")], versions=[0, 0])
    sample.status = Status.COMPLETED
    return sample


async def version_too_few(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.append_tokens([5, 6], log_probs=[-0.5, -1.5], versions=[0, 0])
    sample.weight_versions.pop()
    sample.status = Status.COMPLETED
    return sample


async def mask_of_two(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.append_tokens([5, 6], log_probs=[-0.5, -1.5], versions=[0, 0])
    sample.loss_mask[0] = 2
    sample.status = Status.COMPLETED
    return sample


async def done_without_a_token(config: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.status = Status.COMPLETED
    return sample


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", r"test_groups:raising raised KeyError: 'no such tool' at .*test_groups\.py:\d+, for sample 0"),
        ("text_alone", "must return a Sample or a list of them, got str"),
        ("text_among_samples", "must return a Sample or a list of them, got NoneType"),
        ("nothing", "returned an empty list for sample 0; give it Status.FAILED instead"),
        ("tokens_without_mask", "sample 0 has 2 response tokens but 0 mask entries"),
        (
            "log_prob_of_nan",
            "sample 0 must have one finite number for each of its 2 response tokens in rollout_log_probs",
        ),
        (
            "version_too_few",
            "sample 0 must have one finite number for each of its 2 response tokens in weight_versions",
        ),
        ("mask_of_two", "loss_mask of sample 0 must be 0 or 1, got"),
        ("done_without_a_token", "sample 0 is completed without a single response token"),
    ],
)
def test_a_generate_function_that_breaks_the_rules_is_named(tmp_path: Path, name: str, message: str) -> None:
    flags = ("--generate-function-path", f"test_groups:{name}", "--reward-function-path", "test_groups:length_reward")
    with pytest.raises(ValueError, match=message):
        run_group(make_config(tmp_path, *flags), make_group(), lambda body: answer([5]))
    dropping = make_config(tmp_path, *flags, "--rollout-error", "drop")
    assert run_group(dropping, make_group(), lambda body: answer([5])) == "error_ValueError"


async def gives_up_on_the_second(config: Any, group: list[Sample]) -> list[float]:
    group[1].status = Status.FAILED
    return [1.0, 0.0]


def test_a_sample_that_the_reward_gives_up_on_never_trains(tmp_path: Path) -> None:
    flags = ("--reward-function-path", "test_groups:gives_up_on_the_second")
    assert run_group(make_config(tmp_path, *flags), make_group(), lambda body: answer([5])) == "failed_samples"
    group = make_group()
    config = make_config(tmp_path, *flags, "--min-samples-per-group", "1")
    assert run_group(config, group, lambda body: answer([5])) is None
    assert [sample.index for sample in group.samples] == [0] and group.left_out == {"failed": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "one value for each of the 2 samples, got 1 values"),
        (1.0, "got a float"),
        ([1.0, None], "finite numbers, got None for sample 1"),
        ([1.0, float("nan")], "finite numbers, got nan"),
        ([1.0, {"acc": 1}], "without 'score'"),
        ([1.0, 10**400], "finite numbers, got 1000"),
        ([1.0, torch.ones(2)], "finite numbers, got tensor"),
        ([1.0, "1.0"], "finite numbers, got '1.0'"),
    ],
)
def test_odd_reward_values_are_named(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_rewards(make_config(tmp_path), make_group().samples, values)


def test_reward_dict_keeps_its_other_entries(tmp_path: Path) -> None:
    group = make_group(1)
    set_rewards(make_config(tmp_path), group.samples, [{"score": 0.0, "format": 1.0}])
    assert group.samples[0].reward == 0.0 and group.samples[0].reward_info == {"format": 1.0}


def test_samples_that_the_sample_filter_takes_out_are_scored_first_and_count_as_wasted(tmp_path: Path) -> None:
    flags = ("--reward-function-path", "test_groups:length_reward", "--sample-filter-path", "distinct")
    group = make_group(3)
    assert run_group(make_config(tmp_path, *flags), group, lambda body: answer([5, 2], "x")) is None
    assert [sample.index for sample in group.samples] == [0]
    assert group.samples[0].reward == 2.0 and group.left_out == {"repeated": 2}
