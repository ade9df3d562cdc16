"""Production in every mode with the real buffer, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripted_rollout import (
    CharTokenizer,
    ScriptedClient,
    ScriptedRun,
    run_virtual,
    scripted_config,
)
from slime_rl.buffer.contract_scene import through_disk
from slime_rl.buffer.ledger import Ledger
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.continuous import ContinuousProduction
from slime_rl.rollout.generate import RequestSeeds, seeded
from slime_rl.rollout.group_loop import group_loop
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.rollout.stepped import SteppedProduction
from slime_rl.types import Group, Sample

Batches = list[list[Group]]
BATCH = 4
SIZES = ("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "2", "--num-steps", "12")


def drop_every_third(config: Config, group: list[Sample]) -> str | None:
    return "third" if group[0].group_index % 3 == 0 else None


def drop_all(config: Config, group: list[Sample]) -> str | None:
    return "never_good"


def one_in_ten_is_long(input_ids: list[int]) -> int:
    """20 tokens, or 400, by the prompt's number."""
    return 400 if int("".join(map(chr, input_ids)).split()[1]) % 10 == 7 else 20


def job(
    tmp_path: Path,
    *flags: str,
    length_of: Callable[[list[int]], int] = one_in_ten_is_long,
    steps: int | None = None,
) -> ScriptedRun:
    async def go() -> ScriptedRun:
        return await ScriptedRun(scripted_config(tmp_path, 200, *SIZES, *flags), length_of).run(steps=steps)

    return run_virtual(go())


def content(batches: list[list[Group]]) -> list[list[tuple[int, list[int]]]]:
    return [[(g.group_index, [s.response_length for s in g.samples]) for g in groups] for groups in batches]


@pytest.mark.parametrize("filtered", [False, True])
def test_staleness_0_gives_the_synchronous_batches(tmp_path: Path, filtered: bool) -> None:
    flags = ("--dynamic-filter-path", "test_continuous:drop_every_third") if filtered else ()
    synchronous = job(tmp_path, *flags)
    continuous = job(tmp_path, *flags, "--fully-async", "--max-staleness", "0")
    assert content(continuous.batches) == content(synchronous.batches)
    assert len(continuous.batches) == 12 and set(continuous.ages()) == {0}


@pytest.mark.parametrize("waits", [True, False])
def test_surplus_of_over_sampling_uses_up_no_attempt(tmp_path: Path, waits: bool) -> None:
    """Group 7 takes long; it is at fault only where no step waits for groups that are late."""
    flags = ("--fully-async", "--max-staleness", "1", "--over-sampling-batch-size", "6", "--max-group-attempts", "3")
    done = job(tmp_path, *flags, *([] if waits else ["--no-wait-for-aging"]))
    trained = [group.group_index for groups in done.batches for group in groups]
    assert len(trained) == 12 * BATCH and done.client.num_aborted > 12
    assert (done.buffer.counts().get("dropped/over_age", 0) == 0) == waits == (7 in trained)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_token_is_older_than_the_bound_and_nothing_is_wasted(tmp_path: Path, bound: int) -> None:
    done = job(tmp_path, "--fully-async", "--max-staleness", str(bound))
    assert max(done.ages()) == bound
    assert sum(m["rollout/wasted_tokens"] + m["rollout/over_age_groups"] for m in done.metrics) == 0
    trained = [g.group_index for groups in done.batches for g in groups]
    assert len(set(trained)) == 12 * BATCH and max(trained) < (12 + bound) * BATCH


def test_weights_change_within_a_response_and_every_token_knows_its_own(tmp_path: Path) -> None:
    done = job(tmp_path, "--fully-async", "--max-staleness", "4")
    versions = [s.weight_versions for groups in done.batches for g in groups for s in g.samples]
    assert all(v == sorted(v) for v in versions)
    assert max(len(set(v)) for v in versions) == 5


def test_training_overlaps_generation(tmp_path: Path) -> None:
    async def timed(*flags: str) -> float:
        config = scripted_config(tmp_path, 200, *SIZES, *flags)
        await ScriptedRun(config, lambda ids: 30).run()
        return asyncio.get_running_loop().time()

    synchronous, continuous = run_virtual(timed()), run_virtual(timed("--fully-async", "--max-staleness", "1"))
    assert synchronous == pytest.approx(12 * 60, rel=0.01)
    assert continuous == pytest.approx(12 * 30 + 30, rel=0.01)


@pytest.mark.parametrize(("action", "counter"), [("drop", "dropped"), ("requeue", "waiting")])
def test_without_waiting_late_groups_are_interrupted(tmp_path: Path, action: str, counter: str) -> None:
    done = job(tmp_path, "--fully-async", "--max-staleness", "1", "--no-wait-for-aging", "--over-age", action)
    assert max(done.ages()) <= 1
    assert sum(m["rollout/over_age_groups"] for m in done.metrics) > 0
    assert sum(m["rollout/wasted_tokens"] for m in done.metrics) > 0 and done.client.num_aborted > 0
    assert done.buffer.counts()[counter] > 0 or action == "requeue"
    if action == "drop":
        assert done.buffer.counts()["dropped/over_age"] > 0


def test_mask_trains_on_late_groups_without_their_old_tokens(tmp_path: Path) -> None:
    done = job(tmp_path, "--fully-async", "--max-staleness", "1", "--over-age", "mask")
    assert max(done.ages()) <= 1
    assert sum(m["rollout/over_age_tokens"] for m in done.metrics) > 0
    samples = [s for groups in done.batches for g in groups for s in g.samples]
    masked = [s for s in samples if 0 in s.loss_mask]
    assert masked and all(len(s.loss_mask) == 400 for s in masked)
    assert done.client.num_aborted == 0


def test_the_bound_holds_after_a_resume_with_a_smaller_one(tmp_path: Path) -> None:
    first = job(tmp_path, "--fully-async", "--max-staleness", "6", steps=5)
    smaller = scripted_config(tmp_path, 200, *SIZES, "--fully-async", "--max-staleness", "1")

    async def resumed() -> ScriptedRun:
        second = ScriptedRun(smaller, one_in_ten_is_long)
        second.client.serve(5)
        second.buffer.load_state_dict(first.state)
        return await second.run(start=5)

    second = run_virtual(resumed())
    oldest = [min(g.oldest_version or 0 for g in groups) for groups in second.batches]
    assert len(oldest) == 7 and all(step - version <= 1 for step, version in enumerate(oldest, 5))
    trained = [g.group_index for groups in [*first.batches, *second.batches] for g in groups]
    assert len(trained) == len(set(trained))
    assert sum(m["rollout/over_age_groups"] for m in second.metrics) > 0


def test_a_filter_that_drops_everything_ends_the_run(tmp_path: Path) -> None:
    flags = ("--dynamic-filter-path", "test_continuous:drop_all", "--max-sampling-rounds", "3")
    for mode in ((), ("--rollout-ahead", "1"), ("--fully-async",)):
        with pytest.raises(ValueError, match=r"--max-sampling-rounds.*dropped for never_good"):
            job(tmp_path, *flags, *mode)


def test_no_more_groups_run_than_the_engines_hold(tmp_path: Path) -> None:
    flags = ("--fully-async", "--max-staleness", "8", "--rollout-concurrency", "5")
    done = job(tmp_path, *flags, "--rollout-num-engines", "2")
    assert done.client.most_running == 10  # 5 groups of 2 on 2 engines of 5 slots


async def raising_reward(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 9:
        raise RuntimeError("judge gone")
    return [1.0] * len(group)


@pytest.mark.parametrize("mode", [(), ("--rollout-ahead", "1"), ("--fully-async",)])
def test_an_error_in_production_reaches_the_loop(tmp_path: Path, mode: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="raising_reward raised RuntimeError: judge gone"):
        job(tmp_path, "--reward-function-path", "test_continuous:raising_reward", *mode)


async def hanging_reward(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 9:
        await asyncio.sleep(1e12)
    return [1.0] * len(group)


@pytest.mark.parametrize("mode", [(), ("--rollout-ahead", "1"), ("--fully-async",)])
def test_what_hangs_in_production_ends_the_run_at_the_groups_time_or_is_dropped(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    flags = ("--reward-function-path", "test_continuous:hanging_reward", "--group-timeout-s", "900", *mode)
    with pytest.raises(TimeoutError, match="group 9 was not generated and scored within --group-timeout-s 900"):
        job(tmp_path, *flags)
    done = job(tmp_path, *flags, "--rollout-error", "drop")
    assert len(done.batches) == 12 and done.buffer.counts()["dropped/error_TimeoutError"] == 1


def test_an_error_can_drop_the_group_and_is_counted(tmp_path: Path) -> None:
    flags = ("--reward-function-path", "test_continuous:raising_reward", "--rollout-error", "drop")
    done = job(tmp_path, *flags, "--fully-async")
    assert done.buffer.counts()["dropped/error_ValueError"] == 1 and len(done.batches) == 12


def short_responses(input_ids: list[int]) -> int:
    return 5


@pytest.mark.parametrize("flags", [("--rollout-ahead", "1"), ("--fully-async",), ("--sample-deadline-s", "5")])
def test_deterministic_refuses_what_depends_on_time(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="depend on time, which --deterministic excludes"):
        scripted_config(tmp_path, 5, *SIZES, "--deterministic", *flags)
    scripted_config(tmp_path, 5, *SIZES, "--deterministic", "--fully-async", "--max-staleness", "0")


def test_every_sample_has_its_own_seed_the_same_in_every_run(tmp_path: Path) -> None:
    config = scripted_config(tmp_path, 5, *SIZES, "--deterministic")
    samples = [Sample(index=i, group_index=i // 2, rollout_id=i, prompt="p") for i in range(100)]
    seeds = [seeded(config, sample, {"top_p": 1.0})["sampling_seed"] for sample in samples]
    assert len(set(seeds)) == 100 and seeds == [seeded(config, s, {})["sampling_seed"] for s in samples]
    other = scripted_config(tmp_path, 5, *SIZES, "--deterministic", "--seed", "7")
    assert seeds[0] != seeded(other, samples[0], {})["sampling_seed"]
    assert seeded(scripted_config(tmp_path, 5, *SIZES), samples[0], {"top_p": 1.0}) == {"top_p": 1.0}


def test_every_request_of_a_sample_has_its_own_seed_by_what_precedes_it() -> None:
    def found(*requests: tuple[list[int], str], seed: int = 5) -> list[int]:
        seeds = RequestSeeds()
        return [seeds.seeded({"sampling_seed": seed}, ids, role)["sampling_seed"] for ids, role in requests]

    a, b, other_role = ([1, 2], ""), ([1, 3], ""), ([1, 2], "second")
    first = found(a, a, b, other_role)
    assert len({*first, *found(a, a, b, other_role, seed=6)}) == 8
    assert found(other_role, b, a, a) == [first[3], first[2], first[0], first[1]]
    assert RequestSeeds().seeded({"top_p": 1.0}, [1]) == {"top_p": 1.0}


@pytest.mark.parametrize("mode", [(), ("--rollout-ahead", "1"), ("--fully-async",)])
def test_a_router_that_does_not_answer_ends_the_run_at_the_deadline(tmp_path: Path, mode: tuple[str, ...]) -> None:
    """Real sockets and real time: a server that takes requests and says nothing, then one that is gone."""
    config = scripted_config(tmp_path, 20, *SIZES, "--request-timeout-s", "0.5", *mode)

    async def attempt(url: str) -> None:
        run = ScriptedRun(config, short_responses)
        await run.client.close()
        run.client = EngineClient(url, max_in_flight=8, timeout_s=config.rollout.request_timeout_s)  # type: ignore[assignment]
        await run.run()

    async def go() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for url in (f"http://127.0.0.1:{port}", "http://127.0.0.1:9"):
            async with asyncio.timeout(120):
                with pytest.raises(TimeoutError, match=r"gave no answer within --request-timeout-s 0\.5"):
                    await attempt(url)
        server.close()

    asyncio.run(go())


def any_mode(rng: random.Random) -> list[str]:
    """Flags of a random mode with random settings."""
    flags = rng.choice([[], ["--rollout-ahead", "1"], ["--rollout-ahead", "3"], None, None, None])
    if flags is None:
        flags = ["--fully-async", "--max-staleness", rng.choice(["0", "1", "2", "4"])]
        flags += ["--over-age", rng.choice(["requeue", "drop", "mask"])]
        flags += rng.choice([[], ["--no-wait-for-aging"]])
    else:
        flags += rng.choice([[], ["--replay-groups", "1", "--replay-max-uses", "2"]])
        over_age = ["--over-age", rng.choice(["requeue", "drop", "mask"])]
        flags += rng.choice([[], ["--buffer-max-age", "3", *over_age]])
    late = ["--sample-deadline-s", "90"]
    return [
        *flags,
        *rng.choice([[], ["--partial-rollout"], ["--partial-rollout", "--mask-offpolicy-in-partial-rollout"]]),
        *rng.choice([[], ["--over-sampling-batch-size", "7"]]),
        *rng.choice([[], late, [*late, "--min-samples-per-group", "1"]]),
        *rng.choice([[], ["--dynamic-filter-path", "test_continuous:drop_every_third"]]),
        *rng.choice([[], ["--sample-filter-path", "test_continuous:leave_out_long_ones"]]),
        *rng.choice([[], ["--buffer-filter-path", rng.choice(["oldest_first", "freshest_first"])]]),
        *rng.choice([[], ["--rollout-order", "longest_first"]]),
        *rng.choice([[], ["--rollout-concurrency", "6"]]),
        *rng.choice([[], ["--buffer-memory-bytes", "6000"]]),
        *("--max-group-attempts", "3", "--max-sampling-rounds", "60"),
    ]


def leave_out_long_ones(config: Config, group: list[Sample]) -> list[str | None]:
    return ["long" if sample.response_length > 200 and sample.index % 2 else None for sample in group]


async def part(config: Config, lengths: random.Random, state: Any, start: int, count: int) -> ScriptedRun:
    """`count` steps from a saved state on; None is the beginning."""
    run = ScriptedRun(config, lambda ids: lengths.choice([5, 20, 20, 30, 60, 300]))
    run.client.serve(start)
    if state is not None:
        run.buffer.load_state_dict(state)
    return await run.run(start, count)


def killed_and_resumed(tmp_path: Path, flags: list[str], rng: random.Random, steps: int) -> tuple[Batches, Ledger]:
    """(groups of each step, last ledger) of a run that goes on from its checkpoints; parts of it are done again."""
    lengths = random.Random(rng.random())
    batches: list[list[Group]] = []
    state: Any = None
    while len(batches) < steps:
        start, count = len(batches), rng.randint(1, min(4, steps - len(batches)))
        config = scripted_config(tmp_path, 23, *SIZES, "--shuffle", "--run-dir", str(tmp_path / "run"), *flags)

        run = run_virtual(part(config, lengths, state, start, count))
        if rng.random() < 0.7:  # else killed before it was saved
            batches += run.batches
            state = through_disk(run.state)
        run.buffer.close()
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    return batches, ledger


@pytest.mark.parametrize("seed", range(16))
def test_any_mix_of_settings_trains_each_prompt_once_within_the_bound(tmp_path: Path, seed: int) -> None:
    """Whatever the mode and its flags, through kills: nothing lost, nothing twice, no token too old."""
    rng = random.Random(seed)
    flags = any_mode(rng)
    batches, ledger = killed_and_resumed(tmp_path, flags, rng, steps=10)
    assert all(len(groups) == BATCH for groups in batches), flags
    order = FilePromptSource(scripted_config(tmp_path, 23, *SIZES, "--shuffle")).next_prompts(ledger.next_group_index)
    fresh = [group for groups in batches for group in groups if group.replays == 0]
    trained = [group.group_index for group in fresh]
    assert len(trained) == len(set(trained)), flags
    assert sorted(trained) == [i for i in range(ledger.next_group_index) if ledger.state_of(i) == "committed"], flags
    for group in fresh:
        epoch, prompt = order[group.group_index]
        assert (group.epoch, group.source_index) == (epoch, prompt.source_index), flags
        assert {sample.prompt for sample in group.samples} == {prompt.prompt}, flags
    counts = ledger.counts()
    states = ("waiting", "reserved", "generated", "committed", "dropped")
    assert sum(counts[state] for state in states) == ledger.next_group_index and counts["admitted"] == 0
    bounds = [int(flags[flags.index(f) + 1]) for f in ("--max-staleness", "--buffer-max-age") if f in flags]
    for bound in bounds:
        oldest = [(step, g.oldest_version) for step, groups in enumerate(batches) for g in groups if g.replays == 0]
        assert all(step - version <= bound for step, version in oldest if version is not None), flags


async def breaks_at_group_9(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 9:
        raise RuntimeError("the verifier is gone")
    return [1.0] * len(group)


@pytest.mark.parametrize("flags", [("--rollout-ahead", "4"), ("--fully-async", "--max-staleness", "8")])
def test_a_failure_of_production_is_told_by_the_next_take(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Whatever is generated for later steps already: nothing new comes any more."""
    own = ("--reward-function-path", "test_continuous:breaks_at_group_9", "--rollout-batch-size", "2")
    config = scripted_config(tmp_path, 50, *own, "--n-samples-per-prompt", "2", "--num-steps", "20", *flags)

    async def go() -> int:
        buffer = LedgerBuffer(config, FilePromptSource(config))
        async with ScriptedClient(lambda ids: 5, slots=64) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                made: Any = ContinuousProduction if config.asynchrony.fully_async else SteppedProduction
                arguments = () if config.asynchrony.fully_async else (group_loop,)
                production = made(config, buffer, *arguments, 0)
                try:
                    for step in range(20):
                        production.submit_through(step + config.rollout.rollout_ahead)
                        await production.take(step)
                        await asyncio.sleep(100)  # training; meanwhile production reaches group 9
                        buffer.commit(step)
                except ValueError as error:
                    assert "the verifier is gone" in str(error)
                    return step
                finally:
                    await production.close()
        return 20

    assert run_virtual(go()) <= 1


def drop_after_8(config: Config, samples: list[Sample]) -> str | None:
    return "late" if samples[0].group_index > 8 else None


def test_a_filter_that_drops_everything_ends_production_also_while_the_trainer_is_busy(tmp_path: Path) -> None:
    own = ("--dynamic-filter-path", "test_continuous:drop_after_8", "--max-sampling-rounds", "3", "--rm-type", "exact")
    sizes = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-steps", "9")
    config = scripted_config(tmp_path, 50, *own, *sizes, "--fully-async", "--max-staleness", "4")

    async def go() -> int:
        buffer = LedgerBuffer(config, FilePromptSource(config))
        async with ScriptedClient(lambda ids: 5, slots=8) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                production = ContinuousProduction(config, buffer, 0)
                try:
                    await production.take(0)
                    await asyncio.sleep(10_000)  # training
                    with pytest.raises(ValueError, match=r"--max-sampling-rounds.*dropped for late"):
                        await production.take(1)
                        await production.take(2)
                finally:
                    await production.close()
        return buffer.counts()["dropped"]

    assert run_virtual(go()) <= 5 * 12 + 8  # of five steps, and what ran already
