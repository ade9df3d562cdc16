from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts

from benchmarks.scripted_rollout import CharTokenizer, ScriptedClient, run_virtual, scripted_config
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.config.evaluation import for_evaluation
from slime_rl.rollout.continuous import ContinuousProduction
from slime_rl.rollout.evaluation import Evaluator, majority, pass_at_k, summarise
from slime_rl.rollout.generate import append_generation
from slime_rl.rollout.runtime import RolloutRuntime, current_runtime, use_runtime
from slime_rl.types import Group, Prompt, Sample, Status


@pytest.mark.parametrize(("n", "right", "k"), [(4, 0, 2), (4, 1, 2), (5, 3, 2), (6, 2, 4), (3, 3, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(n: int, right: int, k: int) -> None:
    draws = list(itertools.combinations([i < right for i in range(n)], k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert len(draws) == math.comb(n, k)


def answered(*answers: str, right: str) -> list[Sample]:
    samples = [Sample(index=i, group_index=0, rollout_id=i, prompt="p") for i in range(len(answers))]
    for sample, answer in zip(samples, answers, strict=True):
        sample.response, sample.reward = answer, float(right in answer)
    return samples


def test_the_majority_decides_by_final_answer() -> None:
    assert majority(answered("so \\boxed{5}", "Answer: 5", "4", right="5")) == 1.0
    assert majority(answered("4", "4", "5", right="5")) == 0.0
    assert majority(answered("4", "5", right="5")) == 0.5


def test_samples_of_one_episode_count_once() -> None:
    """Two tries at one prompt: a right one of three branches, a wrong one of a single branch."""
    samples = answered("5", "5", "5", "4", right="5")
    for sample, episode in zip(samples, (0, 0, 0, 1), strict=True):
        sample.rollout_id, sample.status = episode, Status.COMPLETED
    metrics = summarise([Group(group_index=0, source_index=0, epoch=0, samples=samples)])
    assert (metrics["accuracy"], metrics["pass_at_1"], metrics["pass_at_2"]) == (0.5, 0.5, 1.0)
    assert metrics["majority"] == 0.5 and "pass_at_4" not in metrics


def test_a_set_has_its_own_settings(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl")
    sets = ("--eval-prompt-data", "a", str(tmp_path / "a.jsonl"), "b", str(tmp_path / "a.jsonl"))
    overrides = ("b:eval-n-samples-per-prompt=4", "b:eval-temperature=0.6", "b:rm-type=numeric", "b:label-key=none")
    config = make_config(tmp_path, *sets, "--eval-override", *overrides)
    own = for_evaluation(config, "b")
    assert (own.evaluation.eval_n_samples_per_prompt, own.evaluation.eval_temperature) == (4, 0.6)
    assert own.reward.rm_type == "numeric" and own.data.label_field is None
    assert for_evaluation(config, "a") is config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("b:eval-temperature=1", r"--eval-override must name a set of --eval-prompt-data \['a'\]"),
        ("a", "takes NAME:FLAG=VALUE"),
        ("a:lr=1", "takes one of --eval-n-samples-per-prompt"),
        ("a:eval-n-samples-per-prompt=many", "takes int for --eval-n-samples-per-prompt"),
        ("a:eval-n-samples-per-prompt=0", "--eval-n-samples-per-prompt must be > 0"),
    ],
)
def test_bad_overrides_are_named(tmp_path: Path, override: str, message: str) -> None:
    write_prompts(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, "--eval-prompt-data", "a", str(tmp_path / "a.jsonl"), "--eval-override", override)


async def first_half_right(config: Config, group: list[Sample]) -> list[float]:
    return [float(i < len(group) / 2) for i in range(len(group))]


async def hanging_judge(config: Config, group: list[Sample]) -> list[float]:
    if group[0].group_index == 1:
        await asyncio.sleep(1e12)
    return [1.0] * len(group)


async def raising_judge(config: Config, group: list[Sample]) -> list[float]:
    raise RuntimeError("judge gone")


@pytest.mark.parametrize(
    ("judge", "error", "message"),
    [
        (
            "hanging_judge",
            TimeoutError,
            r"^evaluation set held: group 1 was not generated and scored within --group-timeout-s 90",
        ),
        (
            "raising_judge",
            ValueError,
            r"^evaluation set held: .*raising_judge raised RuntimeError: judge gone at .*\d$",
        ),
    ],
)
def test_an_evaluation_that_hangs_or_raises_ends_with_that(
    tmp_path: Path, judge: str, error: type[Exception], message: str
) -> None:
    held = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 3)), "--group-timeout-s", "90")
    config = scripted_config(tmp_path, 5, *held, "--reward-function-path", f"test_evaluation:{judge}")

    async def go() -> None:
        async with ScriptedClient(lambda ids: 50, slots=8) as client:
            runtime = RolloutRuntime(client=client, tokenizer=CharTokenizer())
            with use_runtime(runtime), pytest.raises(error, match=message):
                await Evaluator(config, lambda prompt: [1]).evaluate()

    run_virtual(go())


async def gives_up_on_prompt_1(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    assert sample.response_length == 0, "it goes on from what it gave up on"
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, sampling_params))
    if sample.group_index == 1:
        sample.status = Status.FAILED
    return sample


def test_samples_that_were_given_up_on_are_shown_and_not_tried_again(tmp_path: Path) -> None:
    held = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 4)))
    config = scripted_config(tmp_path, 5, *held, "--generate-function-path", "test_evaluation:gives_up_on_prompt_1")

    async def go() -> tuple[dict[str, float], int]:
        async with ScriptedClient(lambda ids: 50, slots=8) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                metrics, _ = await Evaluator(config, lambda prompt: [1]).evaluate()
        return metrics, client.num_tokens

    metrics, num_tokens = run_virtual(go())
    assert metrics["eval/held/unfinished_fraction"] == 0.25 and num_tokens == 200


def test_prompts_of_a_large_set_do_not_wait_for_each_other_on_their_own_time(tmp_path: Path) -> None:
    held = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 30)), "--group-timeout-s", "250")
    config = scripted_config(tmp_path, 5, *held, "--rollout-concurrency", "2", "--rollout-num-engines", "1")

    async def go() -> float:
        async with ScriptedClient(lambda ids: 50, slots=2) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                await Evaluator(config, lambda prompt: [1]).evaluate()
        assert client.most_running == 2
        return asyncio.get_running_loop().time()

    assert run_virtual(go()) == pytest.approx(30 / 2 * 50)


def test_every_set_is_scored_by_its_own_reward_while_production_goes_on(tmp_path: Path) -> None:
    write_prompts(tmp_path / "held.jsonl", 5)
    sets = ("--eval-prompt-data", "plain", str(tmp_path / "held.jsonl"), "own", str(tmp_path / "held.jsonl"))
    overrides = ("own:eval-n-samples-per-prompt=4", "own:reward-function-path=test_evaluation:first_half_right")
    sizes = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-steps", "9", "--max-staleness", "8")
    config = scripted_config(tmp_path, 50, *sizes, "--fully-async", *sets, "--eval-override", *overrides)

    def encode(prompt: Prompt) -> list[int]:
        return [ord(character) for character in str(prompt.prompt)]

    async def go() -> tuple[dict[str, float], int, int]:
        client = ScriptedClient(lambda ids: 50, slots=256)
        buffer = LedgerBuffer(config, FilePromptSource(config))
        async with client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                production = ContinuousProduction(config, buffer, 0)
                before = len(buffer)
                metrics, samples = await Evaluator(config, encode).evaluate()
                await asyncio.sleep(1)
                await production.close()
        assert len(samples) == 5 + 20
        return metrics, before, len(buffer)

    metrics, before, after = run_virtual(go())
    assert before == 0 and after == 18  # all that --max-staleness allows
    assert metrics["eval/plain/num_prompts"] == 5 and "eval/plain/majority" not in metrics
    assert metrics["eval/own/accuracy"] == 0.5 and metrics["eval/own/pass_at_1"] == 0.5
    assert metrics["eval/own/pass_at_2"] == pytest.approx(5 / 6) and metrics["eval/own/pass_at_4"] == 1.0


def test_an_evaluation_set_that_cannot_work_is_named_before_anything_starts(tmp_path: Path) -> None:
    sets = ("--eval-prompt-data", "a", str(write_prompts(tmp_path / "a.jsonl")))
    for entries, message in [
        (("a:eval-temperature=1", "a:eval-temperature=0.5"), "--eval-override takes --eval-temperature of a once, got"),
        (("a:eval-n-samples-per-prompt=0",), "--eval-override of a: --eval-n-samples-per-prompt must be > 0, got 0"),
        (
            ("a:rm-type=episode",),
            "--eval-override of a: --rm-type cannot be episode with .* single_turn.*got 'episode'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            make_config(tmp_path, *sets, "--eval-override", *entries)
    with pytest.raises(ValueError, match="--rm-type cannot be episode with --generate-function-path agent_loop"):
        make_config(tmp_path, "--generate-function-path", "agent_loop", "--rm-type", "episode")


def test_a_built_in_reward_of_one_set_wins_over_the_runs_own_function(tmp_path: Path) -> None:
    sets = ("--eval-prompt-data", "a", str(write_prompts(tmp_path / "a.jsonl")))
    own = ("--reward-function-path", "mine:reward")
    config = make_config(tmp_path, *sets, *own, "--eval-override", "a:rm-type=exact")
    reward = for_evaluation(config, "a").reward
    assert (reward.rm_type, reward.reward_function_path) == ("exact", None)
    both = ("a:rm-type=exact", "a:reward-function-path=mine:other")
    config = make_config(tmp_path, *sets, *own, "--eval-override", *both)
    assert for_evaluation(config, "a").reward.reward_function_path == "mine:other"
