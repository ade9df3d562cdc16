"""Tokens that are too old, and tokens that never train: who begins anew, what is counted, what a step may have."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from test_continuous import SIZES, any_mode, content, job

from benchmarks.scripted_rollout import CharTokenizer, ScriptedRun, run_virtual, scripted_config
from slime_rl.buffer.ledger import State
from slime_rl.config import Config
from slime_rl.rollout.continuous import ContinuousProduction
from slime_rl.rollout.generate import append_generation
from slime_rl.rollout.group_loop import group_loop
from slime_rl.rollout.groups import mask_older
from slime_rl.rollout.runtime import RolloutRuntime, current_runtime, use_runtime
from slime_rl.rollout.stepped import SteppedProduction
from slime_rl.types import Group, Sample, Status

TINY = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-steps", "8")
OVER = ("--over-sampling-batch-size", "3")
ASYNC = ("--fully-async", "--max-staleness", "1")


def rest(input_ids: list[int]) -> int:
    """20 tokens, or 400 for prompt 7, 17, ..., minus what there is already."""
    text = "".join(map(chr, input_ids))
    return (400 if int(text.rstrip("\x07").split()[1]) % 10 == 7 else 20) - text.count("\x07")


async def forks(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """A finished episode is two samples. The first of a group is short; all of it is written over its sample."""
    assert sample.response_length > 0 or "forked" not in sample.metadata, "this is not what the prompt source gave"
    sample.metadata["forked"] = True
    is_short = sample.index % 2 == 0
    params = {**sampling_params, "max_new_tokens": min(10, sampling_params["max_new_tokens"])} if is_short else None
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, params or sampling_params))
    if sample.status is Status.ABORTED:
        return sample
    mine = {name: list(getattr(sample, name)) for name in ("tokens", "loss_mask", "rollout_log_probs")}
    other = dataclasses.replace(sample, **mine, weight_versions=list(sample.weight_versions), metadata={})
    return [sample, other]


@pytest.mark.parametrize(
    "flags",
    [
        (*OVER, "--buffer-max-age", "1"),
        (*OVER, "--buffer-max-age", "0", "--sample-deadline-s", "60", "--max-group-attempts", "9"),
        (*ASYNC, "--no-wait-for-aging"),
        (*ASYNC, *OVER),
        ("--fully-async", "--max-staleness", "0", *OVER),
    ],
)
def test_a_group_that_begins_anew_has_the_samples_that_it_had_at_first(tmp_path: Path, flags: tuple[str, ...]) -> None:
    own = ("--generate-function-path", "test_ages:forks", "--partial-rollout", *TINY)
    done = job(tmp_path, *own, *flags, length_of=rest)
    assert sum(metrics["rollout/over_age_groups"] for metrics in done.metrics) > 0
    for groups in done.batches:
        for group in groups:
            assert sorted(s.index - 2 * group.group_index for s in group.samples) == [0, 0, 1, 1]
    assert all(len(group.samples) <= 4 for group in done.buffer.reserve(done.buffer.counts()["waiting"]))


async def always_forks(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, sampling_params))
    mine = {name: list(getattr(sample, name)) for name in ("tokens", "loss_mask", "rollout_log_probs")}
    return [sample, dataclasses.replace(sample, **mine, weight_versions=list(sample.weight_versions), metadata={})]


@pytest.mark.parametrize("flags", [OVER, ("--sample-deadline-s", "100"), (*ASYNC, "--no-wait-for-aging")])
def test_pieces_of_an_episode_that_was_interrupted_do_not_multiply(tmp_path: Path, flags: tuple[str, ...]) -> None:
    own = ("--generate-function-path", "test_ages:always_forks", "--partial-rollout", *TINY)
    done = job(tmp_path, *own, *flags, length_of=rest)
    assert done.client.num_aborted > 0
    held = done.buffer.reserve(done.buffer.counts()["waiting"])
    assert all(len(group.samples) == 4 for groups in done.batches for group in groups)
    assert all(len(group.samples) <= 4 for group in held)


@pytest.mark.parametrize("flags", [(), ("--partial-rollout",), ("--over-age", "drop"), ("--over-age", "mask")])
@pytest.mark.parametrize("filtered", [False, True])
def test_over_sampling_at_staleness_0_is_synchronous(tmp_path: Path, flags: tuple[str, ...], filtered: bool) -> None:
    """Equal batches from equal work: nothing is begun that could not train."""
    own = ("--dynamic-filter-path", "test_continuous:drop_every_third") if filtered else ()
    both = (*own, *flags, "--over-sampling-batch-size", "6")
    synchronous = job(tmp_path, *both, "--buffer-max-age", "0")
    continuous = job(tmp_path, *both, "--fully-async", "--max-staleness", "0")
    assert content(continuous.batches) == content(synchronous.batches)
    assert set(continuous.ages()) == {0}
    assert continuous.client.num_tokens == synchronous.client.num_tokens
    assert continuous.ends_s == synchronous.ends_s


def sampled(versions: list[int], mask: list[int] | None = None) -> Sample:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="p")
    n = len(versions)
    sample.append_tokens(list(range(n)), log_probs=[0.0] * n, versions=versions)
    sample.loss_mask = mask or sample.loss_mask
    return sample


@pytest.mark.parametrize(
    ("versions", "mask", "expected"),
    [
        ([1, 2, 2, 2], [1, 1, 1, 1], [0, 1, 1, 1]),
        ([1, 1, 2, 2, 3], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]),  # 2 and 3 in one continuation
        ([1, 2, -1], [1, 1, 0], [0, 1, 0]),
        ([1, 2, 3], [1, 1, 0], [0, 1, 0]),  # the newest ones are not of the loss
        ([2, 2], [1, 1], [1, 1]),
    ],
)
def test_tokens_of_the_newest_weights_stay_in_the_loss(
    versions: list[int], mask: list[int], expected: list[int]
) -> None:
    sample = sampled(versions, list(mask))
    assert mask_older(sample) == sum(mask) - sum(expected)
    assert sample.loss_mask == expected


async def as_a_new_sample(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    answer = await current_runtime().engine.generate(sample.tokens, sampling_params)
    mine = {name: list(getattr(sample, name)) for name in ("tokens", "loss_mask", "rollout_log_probs")}
    made = dataclasses.replace(sample, **mine, weight_versions=list(sample.weight_versions))
    append_generation(made, answer)
    return made


async def in_a_list(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return [await as_a_new_sample(config, sample, sampling_params)]


@pytest.mark.parametrize("function", ["single_turn", "test_ages:as_a_new_sample", "test_ages:in_a_list"])
def test_older_tokens_of_an_interrupted_sample_are_masked_whatever_object_comes_back(
    tmp_path: Path, function: str
) -> None:
    """Late samples of 170 of 400 tokens go on while weights change twice under them."""
    flags = ("--fully-async", "--max-staleness", "8", "--partial-rollout", "--mask-offpolicy-in-partial-rollout")
    late = ("--sample-deadline-s", "170", "--max-group-attempts", "9", "--generate-function-path", function)
    done = job(tmp_path, *flags, *late, length_of=rest)
    continued = [s for groups in done.batches for g in groups for s in g.samples if s.response_length == 400]
    assert continued and any(len(set(s.weight_versions)) > 3 for s in continued)
    for sample in continued:
        newest = max(sample.weight_versions)
        assert sample.loss_mask == [int(version == newest) for version in sample.weight_versions]


async def accounted(config: Config, lengths: random.Random) -> tuple[int, dict[str, int]]:
    """(tokens that the engines sampled, where they are) of a whole run."""
    run = ScriptedRun(config, lambda ids: lengths.choice([5, 20, 20, 30, 60, 300]))
    trained = wasted = 0
    with use_runtime(RolloutRuntime(client=run.client, tokenizer=CharTokenizer())):
        continuous = config.asynchrony.is_continuous
        production: Any = (
            ContinuousProduction(config, run.buffer, 0)
            if continuous
            else SteppedProduction(config, run.buffer, group_loop, 0)
        )
        for step in range(config.train.num_steps):
            production.submit_through(step + config.rollout.rollout_ahead)
            output = await production.take(step)
            trained += sum(group.num_trained_tokens for group in output.groups if group.replays == 0)
            wasted += int(output.metrics["rollout/wasted_tokens"])
            await asyncio.sleep(30)
            run.buffer.commit(step)
            run.client.serve(step + 1)
            production.weights_are(step + 1)
        await asyncio.sleep(1000)  # what runs ends
        held = 0
        if continuous:
            wasted += production.runner.wasted_tokens
            held += sum(flight.group.num_trained_tokens for flight in production.flight.flights.values())
        states = (State.GENERATED, State.WAITING)
        kept = [i for state in states for i in run.buffer.ledger.in_state(state) if i in run.buffer.payloads]
        held += sum(run.buffer.get(index).num_trained_tokens for index in kept)
        await production.close()
    await run.client.close()
    run.buffer.close()
    return run.client.num_tokens, {"trained": trained, "wasted": wasted, "held": held}


@pytest.mark.parametrize("seed", range(12))
def test_every_sampled_token_trains_is_held_or_counts_as_wasted(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    flags = any_mode(rng)
    tokens, places = run_virtual(accounted(scripted_config(tmp_path, 23, *SIZES, *flags), rng))
    assert sum(places.values()) == tokens, (flags, places)


async def starts_anew(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As an environment does."""
    budget = sampling_params["max_new_tokens"] + sample.response_length
    sample.clear_response()
    append_generation(
        sample, await current_runtime().engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": budget})
    )
    return sample


async def gives_nothing_up(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As an agent behind the gateway does: all of it, or nothing."""
    answer = await current_runtime().engine.generate(sample.tokens, sampling_params)
    if answer.finish_reason == "abort":
        sample.status = Status.ABORTED
        return sample
    append_generation(sample, answer)
    return sample


@pytest.mark.parametrize("name", ["starts_anew", "gives_nothing_up"])
@pytest.mark.parametrize(
    "flags", [("--over-sampling-batch-size", "7"), ("--sample-deadline-s", "90"), (*ASYNC, "--no-wait-for-aging")]
)
def test_tokens_of_episodes_that_cannot_go_on_count_as_wasted(
    tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    own = ("--generate-function-path", f"test_ages:{name}", "--partial-rollout", "--max-group-attempts", "2")
    config = scripted_config(tmp_path, 23, *SIZES, *own, *flags)
    tokens, places = run_virtual(accounted(config, random.Random(0)))
    assert sum(places.values()) == tokens and places["wasted"] > 0, places


@pytest.mark.parametrize(
    "flags",
    [
        (*OVER, "--buffer-max-age", "0"),
        (*OVER, "--buffer-max-age", "0", "--over-age", "drop"),
        (*OVER, "--buffer-max-age", "0", "--over-age", "mask"),
        (*OVER, "--fully-async", "--max-staleness", "0"),
    ],
)
def test_tokens_of_generated_groups_over_the_age_are_counted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Three groups end at once, two train, the third is too old for the next step."""
    done = job(tmp_path, *TINY, *flags, length_of=lambda ids: 20)
    for metrics in done.metrics[1:]:
        assert metrics["rollout/over_age_groups"] >= 1
        assert metrics["rollout/over_age_tokens"] == 40 * metrics["rollout/over_age_groups"]
        assert metrics["rollout/wasted_tokens"] >= metrics["rollout/over_age_tokens"]


@pytest.mark.parametrize("action", ["requeue", "drop"])
def test_tokens_of_groups_that_are_interrupted_for_their_age_are_counted(tmp_path: Path, action: str) -> None:
    done = job(tmp_path, *ASYNC, "--no-wait-for-aging", "--over-age", action)
    groups, tokens = (sum(m[f"rollout/over_age_{what}"] for m in done.metrics) for what in ("groups", "tokens"))
    assert groups > 0 and tokens >= 30 * groups
    assert tokens == sum(m["rollout/wasted_tokens"] for m in done.metrics)


def resumed_with_a_smaller_bound(tmp_path: Path, *flags: str, first: tuple[str, ...] = ()) -> ScriptedRun:
    """From step 5 on: what waits was sampled by versions 0 to 4."""
    before = job(tmp_path, "--fully-async", "--max-staleness", "6", *first, length_of=lambda ids: 20, steps=5)
    smaller = scripted_config(tmp_path, 200, *SIZES, *flags)

    async def second() -> ScriptedRun:
        run = ScriptedRun(smaller, lambda ids: 20)
        run.client.serve(5)
        run.buffer.load_state_dict(before.state)
        return await run.run(start=5)

    return run_virtual(second())


@pytest.mark.parametrize("flags", [ASYNC, ("--buffer-max-age", "1"), ("--fully-async", "--max-staleness", "0")])
def test_a_group_without_a_young_token_takes_no_place_in_a_step(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """--over-age mask would train on nothing of it; it is generated anew, as often as --max-group-attempts allows."""
    done = resumed_with_a_smaller_bound(tmp_path, *flags, "--over-age", "mask")
    assert len(done.batches) == 7
    assert all(group.num_trained_tokens == 40 for groups in done.batches for group in groups)
    assert done.buffer.counts()["requeued/stale"] > 4
    assert sum(metrics["rollout/over_age_tokens"] for metrics in done.metrics) > 160
    dropping = resumed_with_a_smaller_bound(tmp_path, *flags, "--over-age", "mask", "--max-group-attempts", "1")
    assert dropping.buffer.counts()["dropped/stale"] > 4 and len(dropping.batches) == 7


async def masks_group_4(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, sampling_params))
    if sample.group_index == 4:
        sample.loss_mask = [0] * sample.response_length
    return sample


async def masks_all(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, sampling_params))
    sample.loss_mask = [0] * sample.response_length
    return sample


@pytest.mark.parametrize("flags", [(), ("--rollout-ahead", "1"), ASYNC])
def test_a_group_without_a_token_in_its_loss_is_dropped_and_counted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = job(tmp_path, *TINY, *flags, "--generate-function-path", "test_ages:masks_group_4")
    assert done.buffer.counts()["dropped/nothing_to_train"] == 1
    assert 4 not in [group.group_index for groups in done.batches for group in groups]
    with pytest.raises(ValueError, match=r"--max-sampling-rounds.*dropped for nothing_to_train"):
        job(tmp_path, *TINY, *flags, "--generate-function-path", "test_ages:masks_all")


def test_newest_and_oldest_version_are_of_the_loss() -> None:
    def group(*samples: Sample) -> Group:
        return Group(group_index=0, source_index=0, epoch=0, samples=list(samples))

    assert (group(sampled([3, 3])).oldest_version, group(sampled([3, 3])).newest_version) == (3, 3)
    mixed = group(sampled([1, 2, 3, -1], [0, 1, 1, 1]), sampled([5, 9], [1, 0]))
    assert (mixed.oldest_version, mixed.newest_version, mixed.num_trained_tokens) == (2, 5, 4)
    nothing = group(sampled([1], [0]))
    assert (nothing.oldest_version, nothing.newest_version) == (None, None)
