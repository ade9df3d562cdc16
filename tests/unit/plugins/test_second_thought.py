from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from factories import make_config
from scripted_engine import answer, scripted_engine

from plugins.generate.second_thought import HINT, generate
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.generate import GENERATE_FUNCTIONS
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.types import Sample, Status

HINT_TOKENS = [40, 41]


class HintTokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert (text, add_special_tokens) == (HINT, False)
        return HINT_TOKENS


def run(tmp_path: Path, replies: list[dict[str, Any]], sample: Sample, budget: int) -> list[dict[str, Any]]:
    """Generate with an engine that gives `replies` in turn; returns the requests it got."""
    script = iter(replies)
    config = make_config(tmp_path)

    async def go() -> list[dict[str, Any]]:
        async with (
            scripted_engine(lambda body: next(script)) as (url, received),
            EngineClient(url, max_in_flight=1, timeout_s=60) as client,
        ):
            with use_runtime(RolloutRuntime(client=client, tokenizer=HintTokenizer())):
                assert await generate(config, sample, {"max_new_tokens": budget}) is sample
        return received

    return asyncio.run(go())


@pytest.fixture
def sample() -> Sample:
    return Sample(index=0, group_index=0, rollout_id=0, prompt="p", tokens=[1, 2], prompt_length=2)


def test_it_loads_as_a_plugin() -> None:
    assert GENERATE_FUNCTIONS.load("plugins.generate.second_thought:generate") is generate


def test_both_answers_are_trained_and_the_hint_is_not(tmp_path: Path, sample: Sample) -> None:
    replies = [answer([5, 2], "five", version="3"), answer([6, 7, 2], "six", version="4")]
    requests = run(tmp_path, replies, sample, budget=10)
    assert sample.tokens == [1, 2, 5, 2, *HINT_TOKENS, 6, 7, 2]
    assert sample.loss_mask == [1, 1, 0, 0, 1, 1, 1]
    assert sample.weight_versions == [3, 3, -1, -1, 4, 4, 4]
    assert sample.rollout_log_probs == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    assert sample.response == f"five{HINT}six" and sample.status is Status.COMPLETED
    assert [request["input_ids"] for request in requests] == [[1, 2], [1, 2, 5, 2, *HINT_TOKENS]]
    assert [request["sampling_params"]["max_new_tokens"] for request in requests] == [10, 6]


@pytest.mark.parametrize("budget", [2, 4])
def test_no_second_turn_when_the_budget_is_used_up(tmp_path: Path, sample: Sample, budget: int) -> None:
    assert len(run(tmp_path, [answer([5, 2], "five")], sample, budget)) == 1
    assert sample.response_length == 2


def test_an_interrupted_sample_goes_on_where_it_stopped(tmp_path: Path, sample: Sample) -> None:
    run(tmp_path, [answer([5, 2], "five"), answer([6], "s", reason="abort")], sample, budget=10)
    assert sample.status is Status.ABORTED
    requests = run(tmp_path, [answer([7, 2], "ix")], sample, budget=10)
    assert requests[0]["input_ids"] == [1, 2, 5, 2, *HINT_TOKENS, 6]
    assert requests[0]["sampling_params"]["max_new_tokens"] == 5
    assert sample.response == f"five{HINT}six" and sample.status is Status.COMPLETED


def test_an_interrupted_first_answer_gets_its_rest_and_then_the_hint(tmp_path: Path, sample: Sample) -> None:
    assert len(run(tmp_path, [answer([5], "fi", reason="abort")], sample, budget=10)) == 1
    run(tmp_path, [answer([8, 2], "ve"), answer([6, 2], "six")], sample, budget=10)
    assert sample.tokens == [1, 2, 5, 8, 2, *HINT_TOKENS, 6, 2]
    assert sample.response == f"five{HINT}six"
