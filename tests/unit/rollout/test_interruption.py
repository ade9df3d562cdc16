"""Samples that are interrupted, late or broken: what they keep, what their group does; nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripted_rollout import CharTokenizer, ScriptedClient, run_virtual, scripted_config
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.generate import append_generation
from slime_rl.rollout.group_loop import group_loop
from slime_rl.rollout.groups import GroupRunner
from slime_rl.rollout.in_flight import GRACE_S, InFlight
from slime_rl.rollout.runtime import RolloutRuntime, current_runtime, use_runtime
from slime_rl.rollout.scope import SampleScope, use_scope
from slime_rl.types import Group, RolloutOutput, Sample, Status

SIZES = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-steps", "9", "--max-response-len", "1000")
OVER_SAMPLING = ("--over-sampling-batch-size", "3")


def number_of(input_ids: list[int]) -> int:
    return int("".join(map(chr, input_ids[:8])).split()[1])


def prompt_0_is_long(input_ids: list[int]) -> int:
    """300 tokens after prompt 0, minus what it has already; 20 after others."""
    return 320 - len(input_ids) if number_of(input_ids) == 0 else 20


class Steps:
    """Synchronous steps on a scripted engine; new weights after each."""

    def __init__(self, tmp_path: Path, *flags: str, length_of: Callable[[list[int]], int] = prompt_0_is_long) -> None:
        self.config = scripted_config(tmp_path, 50, *SIZES, *flags)
        self.length_of, self.slots = length_of, 64
        self.outputs: list[RolloutOutput] = []
        self.seconds: list[float] = []

    def run(self, num_steps: int) -> Steps:
        run_virtual(self._run(num_steps))
        return self

    async def _run(self, num_steps: int) -> None:
        self.client = ScriptedClient(self.length_of, slots=self.slots)
        self.buffer = LedgerBuffer(self.config, FilePromptSource(self.config))
        loop = asyncio.get_running_loop()
        async with self.client:
            runtime = RolloutRuntime(client=self.client, tokenizer=CharTokenizer())
            self.lengths = runtime.lengths
            with use_runtime(runtime):
                for step in range(num_steps):
                    begin = loop.time()
                    self.outputs.append(await group_loop(self.config, step, self.buffer))
                    self.seconds.append(loop.time() - begin)
                    self.buffer.commit(step)
                    self.client.serve(step + 1)

    def group(self, index: int) -> Group:
        found = [group for output in self.outputs for group in output.groups if group.group_index == index]
        assert len(found) == 1
        return found[0]


def test_surplus_is_aborted_at_the_engine_and_starts_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path, *OVER_SAMPLING).run(1)
    assert [g.group_index for g in steps.outputs[0].groups] == [1, 2]
    assert steps.seconds[0] == pytest.approx(20, abs=1) and steps.client.num_aborted == 2
    (waiting,) = steps.buffer.reserve(1)
    assert waiting.group_index == 0 and waiting.attempts == 0
    assert [s.response_length for s in waiting.samples] == [0, 0]
    assert steps.outputs[0].metrics["rollout/wasted_tokens"] == pytest.approx(40, abs=2)


def second_sample_of_prompt_0_is_long(input_ids: list[int]) -> int:
    if number_of(input_ids) != 0:
        return 20
    second_sample_of_prompt_0_is_long.calls += 1  # type: ignore[attr-defined]
    return 20 if second_sample_of_prompt_0_is_long.calls % 2 else 500  # type: ignore[attr-defined]


def test_a_surplus_group_is_not_cut_to_the_samples_that_were_finished(tmp_path: Path) -> None:
    """It has no late sample: it goes on when its turn comes, instead of training on its short responses."""
    second_sample_of_prompt_0_is_long.calls = 0  # type: ignore[attr-defined]
    flags = (*OVER_SAMPLING, "--partial-rollout", "--min-samples-per-group", "1", "--sample-deadline-s", "1000")
    steps = Steps(tmp_path, *flags, length_of=second_sample_of_prompt_0_is_long).run(1)
    assert [g.group_index for g in steps.outputs[0].groups] == [1, 2]
    (waiting,) = steps.buffer.reserve(1)
    assert [s.status for s in waiting.samples] == [Status.COMPLETED, Status.ABORTED] and waiting.left_out == {}
    assert steps.outputs[0].metrics["rollout/wasted_tokens"] == 0


def drop_prompt_1(config: Config, group: list[Sample]) -> str | None:
    return "mine" if group[0].group_index == 1 else None


def test_a_dropped_group_is_replaced_while_the_others_run(tmp_path: Path) -> None:
    steps = Steps(tmp_path, "--dynamic-filter-path", "test_interruption:drop_prompt_1").run(1)
    (output,) = steps.outputs
    assert [group.group_index for group in output.groups] == [0, 2]
    assert steps.seconds[0] == pytest.approx(312, abs=1) and output.metrics["rollout/sampling_rounds"] == 1.5


@pytest.mark.parametrize("size", [None, "3"])
def test_no_more_groups_are_begun_for_a_step_than_max_sampling_rounds_allows(tmp_path: Path, size: str | None) -> None:
    flags = ("--dynamic-filter-path", "test_continuous:drop_all", "--max-sampling-rounds", "4")
    most = 4 * int(size or 2)
    with pytest.raises(ValueError, match=rf"only 0 of 2 groups after {most} that were begun \(--max-sampling-rounds\)"):
        Steps(tmp_path, *flags, *([] if size is None else ["--over-sampling-batch-size", size])).run(1)


async def second_of_group_0_fails(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    assert sample.status is not Status.FAILED
    fails = sample.index == 1
    params = {**sampling_params, "max_new_tokens": 5} if fails else sampling_params
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, params))
    if fails:
        sample.status = Status.FAILED
    return sample


async def gives_up_slowly(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 0 and len(group) == 2:
        group[1].status = Status.FAILED
        await asyncio.sleep(5)
    return [float(sample.index % 2) for sample in group]


def test_a_failed_sample_stays_failed_while_the_others_of_its_group_go_on(tmp_path: Path) -> None:
    """Its group, interrupted as surplus, can do without it: it is neither dropped for it, nor does it go on from it."""
    flags = (*OVER_SAMPLING, "--partial-rollout", "--min-samples-per-group", "1", "--max-response-len", "100")
    failing = ("--generate-function-path", "test_interruption:second_of_group_0_fails")
    steps = Steps(tmp_path, *flags, *failing).run(6)
    assert steps.client.num_aborted >= 3
    (sample,) = steps.group(0).samples
    assert (sample.index, sample.response_length, steps.group(0).left_out) == (0, 100, {"failed": 1})
    assert sum(output.metrics["rollout/wasted_tokens"] for output in steps.outputs) == 5


def test_a_group_that_was_interrupted_by_its_judge_alone_trains_without_its_failed_sample(tmp_path: Path) -> None:
    flags = (*OVER_SAMPLING, "--partial-rollout", "--min-samples-per-group", "1")
    judge = ("--reward-function-path", "test_interruption:gives_up_slowly")
    steps = Steps(tmp_path, *flags, *judge, length_of=lambda ids: 20).run(2)
    assert [s.index for s in steps.group(0).samples] == [0] and steps.group(0).left_out == {"failed": 1}


def test_late_samples_get_another_attempt_where_a_failed_one_can_be_done_without(tmp_path: Path) -> None:
    """Sample 0 takes 312 s, at most 100 s a time; where both samples are needed the group cannot come together."""
    flags = ("--partial-rollout", "--sample-deadline-s", "100", "--max-group-attempts", "9")
    failing = ("--generate-function-path", "test_interruption:second_of_group_0_fails")
    steps = Steps(tmp_path, *flags, *failing, "--min-samples-per-group", "1").run(2)
    (sample,) = steps.group(0).samples
    assert sample.response_length == 312 and sample.status is Status.COMPLETED
    without = Steps(tmp_path, *flags, *failing).run(1)
    assert without.buffer.counts()["dropped/failed_samples"] == 1


def test_partial_rollout_continues_with_the_rest_of_the_budget(tmp_path: Path) -> None:
    steps = Steps(tmp_path, *OVER_SAMPLING, "--partial-rollout")
    steps.run(9)
    assert all(output.metrics["rollout/wasted_tokens"] == 0 for output in steps.outputs)
    assert steps.client.num_aborted >= 8
    (partial,) = steps.buffer.reserve(1)  # 9 steps of 20 s: 180 of 312 tokens so far
    assert partial.group_index == 0
    for sample in partial.samples:
        assert sample.status is Status.ABORTED and 150 < sample.response_length < 200
        assert sorted(set(sample.weight_versions)) == list(range(9))
        assert len(sample.tokens) == sample.prompt_length + sample.response_length == 8 + len(sample.rollout_log_probs)


def test_a_continued_sample_never_exceeds_its_budget(tmp_path: Path) -> None:
    flags = ("--partial-rollout", "--max-response-len", "50")
    steps = Steps(tmp_path, *OVER_SAMPLING, *flags, length_of=lambda ids: 400 if number_of(ids) == 0 else 20).run(4)
    samples = steps.group(0).samples
    assert [s.response_length for s in samples] == [50, 50]
    assert all(len(set(s.weight_versions)) == 3 for s in samples)


def test_older_tokens_of_a_continued_sample_can_be_masked(tmp_path: Path) -> None:
    flags = ("--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--max-response-len", "50")
    steps = Steps(tmp_path, *OVER_SAMPLING, *flags, length_of=lambda ids: 400 if number_of(ids) == 0 else 20).run(4)
    for sample in steps.group(0).samples:
        newest = max(sample.weight_versions)
        assert sample.loss_mask == [int(version == newest) for version in sample.weight_versions]
    assert all(set(s.loss_mask) == {1} for s in steps.group(1).samples)


def test_a_partial_group_over_the_age_begins_anew(tmp_path: Path) -> None:
    steps = Steps(tmp_path, *OVER_SAMPLING, "--partial-rollout", "--buffer-max-age", "2").run(5)
    assert [output.metrics["rollout/over_age_groups"] for output in steps.outputs] == [0, 0, 0, 1, 0]
    lost = [output.metrics["rollout/wasted_tokens"] for output in steps.outputs]
    assert lost == [0, 0, 0, pytest.approx(120, abs=6), 0]  # 20 tokens of two samples in each of three steps
    assert steps.outputs[3].metrics["rollout/over_age_tokens"] == lost[3]
    (partial,) = steps.buffer.reserve(1)
    assert {version for sample in partial.samples for version in sample.weight_versions} == {3, 4}


def test_surplus_groups_over_the_age_are_generated_anew_dropped_or_masked(tmp_path: Path) -> None:
    found = {}
    for action in ("requeue", "drop", "mask"):
        flags = ("--over-sampling-batch-size", "3", "--buffer-max-age", "0", "--over-age", action)
        steps = Steps(tmp_path, *flags, length_of=lambda ids: 20).run(2)  # three groups finish at once
        found[action] = [group.group_index for group in steps.outputs[1].groups]
        trained = [v for g in steps.outputs[1].groups for s in g.samples for v, m in versions_and_mask(s) if m]
        assert set(trained) == {1}
        assert steps.outputs[1].metrics["rollout/over_age_groups"] == 1
        assert steps.buffer.counts().get("dropped/stale", 0) == (action == "drop")
        assert steps.buffer.counts().get("requeued/stale", 0) == (action != "drop")
    assert found == {"requeue": [2, 3], "drop": [3, 4], "mask": [2, 3]}


def versions_and_mask(sample: Sample) -> list[tuple[int, int]]:
    return list(zip(sample.weight_versions, sample.loss_mask, strict=True))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fully-async", "--buffer-max-age", "2"), "--buffer-max-age is --max-staleness with --fully-async, got 2"),
        (
            ("--rollout-ahead", "2", "--buffer-max-age", "1"),
            "--buffer-max-age must be >= --rollout-ahead .2., got 1",
        ),
    ],
)
def test_an_age_that_cannot_be_kept_is_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scripted_config(tmp_path, 5, *SIZES, *flags)


def one_sample_is_long(input_ids: list[int]) -> int:
    """Every second request takes 500."""
    one_sample_is_long.calls += 1  # type: ignore[attr-defined]
    return 500 if one_sample_is_long.calls % 2 else 20  # type: ignore[attr-defined]


def test_a_group_trains_without_its_late_sample(tmp_path: Path) -> None:
    one_sample_is_long.calls = 0  # type: ignore[attr-defined]
    flags = ("--sample-deadline-s", "60", "--min-samples-per-group", "1")
    steps = Steps(tmp_path, *flags, length_of=one_sample_is_long).run(1)
    assert [[s.response_length for s in g.samples] for g in steps.outputs[0].groups] == [[20], [20]]
    assert steps.seconds[0] < 62 and steps.client.num_aborted == 2
    assert steps.outputs[0].metrics["rollout/wasted_tokens"] == pytest.approx(120, abs=3)


def test_a_group_that_needs_all_its_samples_is_tried_again_then_dropped(tmp_path: Path) -> None:
    flags = ("--sample-deadline-s", "60", "--max-group-attempts", "3")
    steps = Steps(tmp_path, *flags).run(1)
    assert steps.buffer.counts()["dropped/late_samples"] == 1
    assert 180 < steps.seconds[0] < 210  # three attempts, and then another prompt
    assert [g.group_index for g in steps.outputs[0].groups] == [1, 2]


def test_a_late_sample_keeps_itversions_and_mask_with_partial_rollout(tmp_path: Path) -> None:
    flags = ("--sample-deadline-s", "170", "--max-group-attempts", "3", "--partial-rollout")
    steps = Steps(tmp_path, *flags).run(1)
    assert [g.group_index for g in steps.outputs[0].groups] == [0, 1]
    assert [s.response_length for s in steps.group(0).samples] == [312, 312]
    assert steps.outputs[0].metrics["rollout/wasted_tokens"] == 0


async def deaf(config: Config, sample: Sample, sampling_params: dict[str, object]) -> Sample:
    """A tool that hangs in sample 0 and hears of nothing."""
    if sample.index == 0:
        await asyncio.sleep(1e9)
    sample.append_tokens([5], log_probs=[-1.0], versions=[0])
    sample.status = Status.COMPLETED
    return sample


def test_a_generate_function_that_hangs_is_cancelled(tmp_path: Path) -> None:
    flags = ("--generate-function-path", "test_interruption:deaf", "--over-sampling-batch-size", "3")
    steps = Steps(tmp_path, *flags).run(1)
    assert [g.group_index for g in steps.outputs[0].groups] == [1, 2]
    assert steps.seconds[0] < GRACE_S + 2


@pytest.mark.parametrize(
    "function",
    ["--generate-function-path=test_interruption:deaf", "--reward-function-path=test_interruption:slow_judge"],
)
def test_what_hangs_is_an_error_after_the_groups_time(tmp_path: Path, function: str) -> None:
    with pytest.raises(TimeoutError, match=r"group \d was not generated and scored within --group-timeout-s 40"):
        Steps(tmp_path, function, "--group-timeout-s", "40", length_of=lambda ids: 20).run(1)
    steps = Steps(tmp_path, function, "--group-timeout-s", "40", "--rollout-error", "drop", length_of=lambda ids: 20)
    assert steps.run(1).buffer.counts()["dropped/error_TimeoutError"] == 1 and steps.seconds[0] < 65


async def swallow_once() -> None:
    try:
        await asyncio.sleep(1e9)
    except asyncio.CancelledError:
        await asyncio.sleep(1e9)


async def stubborn(config: Config, sample: Sample, sampling_params: dict[str, object]) -> Sample:
    if sample.index == 0:
        await swallow_once()
    sample.append_tokens([5], log_probs=[-1.0], versions=[0])
    sample.status = Status.COMPLETED
    return sample


async def stubborn_judge(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 1:
        await swallow_once()
    return [1.0] * len(group)


@pytest.mark.parametrize(
    "function",
    ["--generate-function-path=test_interruption:stubborn", "--reward-function-path=test_interruption:stubborn_judge"],
)
def test_what_takes_no_notice_of_its_cancellation_is_an_error_too(tmp_path: Path, function: str) -> None:
    with pytest.raises(
        TimeoutError, match=r"group \d goes on though it was cancelled 10 s ago; --generate-function-path"
    ):
        Steps(tmp_path, function, "--group-timeout-s", "40", length_of=lambda ids: 20).run(1)
    steps = Steps(tmp_path, function, "--group-timeout-s", "40", "--rollout-error", "drop", length_of=lambda ids: 20)
    assert steps.run(1).buffer.counts()["dropped/error_TimeoutError"] == 1 and steps.seconds[0] < 90


async def cancelling(config: Config, sample: Sample, sampling_params: dict[str, object]) -> Sample:
    raise asyncio.CancelledError


async def cancelling_judge(config: Config, group: list[Sample]) -> list[float]:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "function",
    [
        "--generate-function-path=test_interruption:cancelling",
        "--reward-function-path=test_interruption:cancelling_judge",
    ],
)
def test_a_cancellation_that_is_not_the_runs_is_an_error(tmp_path: Path, function: str) -> None:
    with pytest.raises(ValueError, match=r"raised CancelledError, for (group|sample) \d"):
        Steps(tmp_path, function, length_of=lambda ids: 20).run(1)


def test_a_tool_that_hangs_before_any_request_is_late_too(tmp_path: Path) -> None:
    flags = ("--generate-function-path", "test_interruption:deaf", "--sample-deadline-s", "60")
    steps = Steps(tmp_path, *flags, "--min-samples-per-group", "1").run(1)
    assert [[s.index for s in g.samples] for g in steps.outputs[0].groups] == [[1], [2, 3]]
    assert 60 < steps.seconds[0] < 62 + GRACE_S


async def slow_judge(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 1:
        await asyncio.sleep(1e9)
    return [1.0] * len(group)


def test_a_full_batch_does_not_wait_for_a_slow_judge(tmp_path: Path) -> None:
    flags = ("--reward-function-path", "test_interruption:slow_judge", *OVER_SAMPLING, "--partial-rollout")
    steps = Steps(tmp_path, *flags, length_of=lambda ids: 20).run(1)
    assert [g.group_index for g in steps.outputs[0].groups] == [0, 2] and steps.seconds[0] < 21
    (waiting,) = steps.buffer.reserve(1)
    assert [(s.status, s.response_length) for s in waiting.samples] == [(Status.COMPLETED, 20)] * 2  # only to be scored


def test_groups_that_are_interrupted_before_they_have_begun_end_at_once(tmp_path: Path) -> None:
    config = scripted_config(tmp_path, 50, *SIZES)

    async def go() -> tuple[float, int]:
        buffer = LedgerBuffer(config, FilePromptSource(config))
        async with ScriptedClient(lambda ids: 100, slots=64) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                flight = InFlight(GroupRunner(config), buffer)
                flight.start(buffer.reserve(3), 0)
                await flight.hand_back()
                await flight.close()
        return asyncio.get_running_loop().time(), buffer.counts()["waiting"]

    seconds, waiting = run_virtual(go())
    assert seconds < 1 and waiting == 3


def third_is_long(input_ids: list[int]) -> int:
    return [10, 10, 40][number_of(input_ids) % 3]


def test_longest_first_starts_what_took_longest_before(tmp_path: Path) -> None:
    """Two slots and the same three prompts in every step: the long one starts first once it is known."""
    flags = ("--rollout-batch-size", "3", "--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce")
    seconds = {}
    for order in ("in_order", "longest_first"):
        steps = Steps(tmp_path, *flags, "--rollout-order", order, length_of=third_is_long)
        rows = [f'{{"prompt": "prompt {i}", "label": "1"}}\n' for i in range(3)]
        (tmp_path / "prompts.jsonl").write_text("".join(rows))
        steps.slots = 2
        seconds[order] = steps.run(2).seconds
    assert seconds["in_order"] == pytest.approx([50, 50], abs=1)
    assert seconds["longest_first"] == pytest.approx([50, 40], abs=1)


def test_an_abort_reaches_the_engine_behind_the_router() -> None:
    from aiohttp import web
    from aiohttp.test_utils import TestServer
    from scripted_engine import answer

    aborted: list[str] = []
    release = asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        await release.wait()
        return web.json_response(answer([4, 5], reason="abort" if body["rid"] in aborted else "stop"))

    async def abort(request: web.Request) -> web.Response:
        aborted.append((await request.json())["rid"])
        release.set()
        return web.Response()

    async def go() -> None:
        engine, router = TestServer(app := web.Application()), TestServer(front := web.Application())
        app.router.add_post("/abort_request", abort)
        await engine.start_server()

        async def workers(request: web.Request) -> web.Response:
            return web.json_response({"workers": [{"url": str(engine.make_url(""))}, {"url": "http://127.0.0.1:9"}]})

        front.router.add_post("/generate", generate)
        front.router.add_get("/workers", workers)
        await router.start_server()
        scope = SampleScope()
        async with EngineClient(str(router.make_url("")), max_in_flight=4, timeout_s=60) as client:
            with use_scope(scope):
                request = asyncio.create_task(client.generate([1], {}))
            while not scope.requests:
                await asyncio.sleep(0.01)
            scope.interrupt(0.0)
            await client.abort(scope.requests)
            result = await request
            assert result.finish_reason == "abort" and result.tokens == [4, 5] and len(aborted) == 1
            with use_scope(scope):
                later = await client.generate([1], {})  # the same sample asks for nothing more
            assert later.finish_reason == "abort" and later.tokens == []
        await router.close()
        await engine.close()

    asyncio.run(go())


def test_waiting_for_a_slot_counts_for_no_time_limit(tmp_path: Path) -> None:
    """Four samples of 20 s on one slot: the last one waits 60 s, and no function or engine hangs."""
    for limit in ("--group-timeout-s", "--sample-deadline-s"):
        steps = Steps(tmp_path, limit, "50", length_of=lambda ids: 20)
        steps.slots = 1
        assert len(steps.run(1).outputs[0].groups) == 2 and steps.buffer.counts()["dropped"] == 0


async def two_turns(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    for _ in range(2):
        answer = await current_runtime().engine.generate(sample.tokens, sampling_params)
        sample.append_tokens(answer.tokens, log_probs=answer.log_probs, versions=answer.versions)
    sample.status = Status.COMPLETED
    return sample


def test_waiting_between_turns_counts_for_no_deadline(tmp_path: Path) -> None:
    flags = ("--generate-function-path", "test_interruption:two_turns", "--sample-deadline-s", "50")
    steps = Steps(tmp_path, *flags, length_of=lambda ids: 20)
    steps.slots = 1
    groups = steps.run(1).outputs[0].groups
    assert [group.attempts for group in groups] == [1, 1] and steps.client.num_aborted == 0
    assert all(sample.response_length == 40 for group in groups for sample in group.samples)
