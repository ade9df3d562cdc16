from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from plugins.data.reasoning_gym_source import METADATA_KEY, ReasoningGymSource, main
from plugins.data.reasoning_gym_tasks import open_task, parse_task_spec
from plugins.rewards.reasoning_gym import answer_of, reward
from slime_rl.buffer.policies import PROMPT_SOURCES
from slime_rl.buffer.sources import read_prompts
from slime_rl.rollout.rewards import REWARDS
from slime_rl.rollout.rewards.fence import ProcessFence, use_fence
from slime_rl.types import Prompt, Sample

pytest.importorskip("reasoning_gym")

SOURCE = "plugins.data.reasoning_gym_source:ReasoningGymSource"
SUMS = "chain_sum?size=6&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def make_source(tmp_path: Path, *flags: str, spec: str = SUMS) -> ReasoningGymSource:
    config = make_config(tmp_path, "--data-source-path", SOURCE, "--prompt-data", spec, *flags)
    return PROMPT_SOURCES.load(SOURCE)(config)


def drawn(source: ReasoningGymSource, count: int) -> list[tuple[int, int]]:
    return [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(count)]


def test_prompts_ask_for_the_answer_and_carry_their_entry(tmp_path: Path) -> None:
    prompt = make_source(tmp_path).get(1)
    assert prompt.prompt == (
        "State the final answer to the following arithmetic problem: 1 + 5 =\nAnswer with just the number."
    )
    assert prompt.label == "6"
    told = prompt.metadata[METADATA_KEY]
    assert told["entry"]["answer"] == "6" and told["entry"]["metadata"]["source_index"] == 1
    assert parse_task_spec(told["task"]) == parse_task_spec(SUMS)
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata


def test_every_epoch_has_each_entry_once_in_an_order_of_seed_and_epoch(tmp_path: Path) -> None:
    first, second = make_source(tmp_path), make_source(tmp_path)
    order = drawn(first, 18)
    assert order == drawn(second, 7) + drawn(second, 11)
    for epoch in range(3):
        assert sorted(index for e, index in order if e == epoch) == list(range(6))
    assert order != drawn(make_source(tmp_path, "--seed", "7"), 18)
    assert drawn(make_source(tmp_path, "--no-shuffle"), 7) == [(0, i) for i in range(6)] + [(1, 0)]


def test_a_saved_cursor_goes_on_with_the_next_prompt(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    source.next_prompts(8)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make_source(tmp_path)
    resumed.load_state_dict(state)
    assert drawn(resumed, 9) == drawn(source, 9)


def test_a_cursor_of_another_task_or_order_is_refused(tmp_path: Path) -> None:
    state = make_source(tmp_path).state_dict()
    with pytest.raises(ValueError, match=r"have task 'chain_sum\?.*size=6', this run has 'chain_sum\?.*size=7'"):
        make_source(tmp_path, spec=SUMS.replace("size=6", "size=7")).load_state_dict(state)
    with pytest.raises(ValueError, match="have shuffle True, this run has False"):
        make_source(tmp_path, "--no-shuffle").load_state_dict(state)


def test_long_prompts_are_refused_or_left_out(tmp_path: Path) -> None:
    def encode(prompt: Prompt) -> list[int]:
        return [0] * (20 if prompt.source_index == 4 else 5)

    with pytest.raises(ValueError, match=r"chain_sum\[4\]: the prompt has 20 tokens, over --max-prompt-len 10"):
        make_source(tmp_path, "--max-prompt-len", "10").limit_lengths(encode)
    source = make_source(tmp_path, "--max-prompt-len", "10", "--long-prompt", "skip")
    source.limit_lengths(encode)
    assert len(source) == 5 and 4 not in {index for _, index in drawn(source, 10)}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain_summ?size=3", "has no task 'chain_summ'; did you mean 'chain_sum'"),
        ("chain_sum?digits=3", "chain_sum has no option 'digits'; it has min_terms"),
        ("chain_sum?size", "must be TASK.KEY=VALUE&KEY=VALUE, got 'size' in it"),
        ("chain_sum?size=3&size=4", "gives 'size' twice"),
        ("chain_sum?size=none", "size of .* must be a whole number >= 1, got 'none'"),
        ("chain_sum?min_terms=5&max_terms=2", "rejects it: max_terms must be >= min_terms"),
    ],
)
def test_a_bad_spec_is_refused_by_name(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--prompt-data.*{message}"):
        make_source(tmp_path, spec=spec)


def test_values_of_a_spec_are_json_where_they_can_be() -> None:
    spec = parse_task_spec('basic_arithmetic?operators=["+","-"]&allow_negation=false&format_style=simple')
    assert spec.options["operators"] == ["+", "-"] and spec.options["allow_negation"] is False
    assert (spec.options["format_style"], spec.options["size"], spec.options["seed"]) == ("simple", 500, 1)
    assert parse_task_spec(spec.text) == spec
    assert "*" not in "".join(open_task(spec)[i]["question"] for i in range(20))


def test_written_rows_are_read_back_as_the_same_prompts_without_excluded_ones(tmp_path: Path) -> None:
    file = tmp_path / "held" / "out.jsonl"
    heldout = SUMS.replace("seed=1", "seed=4")  # entries 0 to 2 are entries 3 to 5 of the other
    assert main([heldout, "--output", str(file), "--without", SUMS]) == 0
    source = make_source(tmp_path, spec=heldout)
    prompts = read_prompts(str(file), source.config.data)
    assert [(p.prompt, p.label, p.metadata) for p in prompts] == [
        (p.prompt, p.label, p.metadata) for p in (source.get(index) for index in (3, 4, 5))
    ]


def test_the_writer_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SUMS, "--output", str(tmp_path / "x.jsonl"), "--without", SUMS]) == 2
    assert "leaves no question of 6" in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def score(tmp_path: Path, rows: list[tuple[Prompt, str]]) -> list[dict[str, Any]]:
    group = [
        Sample(index=i, group_index=0, rollout_id=i, prompt=p.prompt, response=text, metadata=p.metadata)
        for i, (p, text) in enumerate(rows)
    ]

    async def go() -> list[dict[str, Any]]:
        with ProcessFence(1, timeout_s=60.0) as fence, use_fence(fence):
            return await reward(make_config(tmp_path), group)

    return asyncio.run(go())


def test_the_tasks_own_verifier_scores_the_final_answer(tmp_path: Path) -> None:
    prompt = make_source(tmp_path).get(1)
    responses = [
        "6",
        " 6.0\n",
        "The final answer is 6.",
        "1 + 5 = 6",
        "<think>7</think>6",
        "Answer: 7",
        "16",
        "",
        "6 of 7",
    ]
    values = score(tmp_path, [(prompt, text) for text in responses])
    assert [value["score"] for value in values] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_that_is_no_number_may_score_a_part(tmp_path: Path) -> None:
    prompt = make_source(tmp_path, spec="letter_counting?size=1").get(0)
    assert prompt.prompt.endswith("Answer with just the number.")
    prompt = make_source(tmp_path, spec="spell_backward?size=1&min_word_len=6&max_word_len=6").get(0)
    assert prompt.prompt.endswith("Answer with just the final answer.")
    whole, part, none = score(tmp_path, [(prompt, t) for t in (f"Answer: {prompt.label}", prompt.label[:5] + "#", "-")])
    assert whole["score"] == 1.0 and 0.0 < part["score"] < 1.0 and none["score"] == 0.0


def test_a_verifier_that_fails_scores_nothing_and_says_so(tmp_path: Path) -> None:
    prompt = make_source(tmp_path).get(1)
    told = prompt.metadata[METADATA_KEY]
    broken = dataclasses.replace(prompt, metadata={METADATA_KEY: {**told, "task": "no_such_task"}})
    (value,) = score(tmp_path, [(broken, "6")])
    assert (value["score"], value["failure"]) == (0.0, "error") and "no_such_task" in value["failure_message"]


def test_a_prompt_of_another_source_is_refused(tmp_path: Path) -> None:
    prompt = Prompt(source_index=0, prompt="p", label="1", metadata={"task": "x"})
    with pytest.raises(ValueError, match=r"needs metadata\['reasoning_gym'\].*got None for sample 0"):
        score(tmp_path, [(prompt, "1")])
    assert REWARDS.load("plugins.rewards.reasoning_gym:reward") is reward


@pytest.mark.parametrize(
    ("right", "response", "answer"),
    [
        ("-4", "5 - 9 = -4", "-4"),
        ("-4", "The answer is -4.", "-4"),
        ("-4", "no idea", "no idea"),
        ("2.5", "It is 2.5", "It is 2.5"),  # only whole numbers are picked out of text
        ("red", "I say: the answer is red.", "red"),
        ("red", " red\n", "red"),
    ],
)
def test_the_answer_is_the_number_or_the_marked_text(right: str, response: str, answer: str) -> None:
    assert answer_of(response, {"answer": right}) == answer
