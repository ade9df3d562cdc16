from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from random_chats import FAMILIES, TOOLS, random_conversation, sampled_text, tokenizer_for, trained_bpe

from slime_rl.rollout.agent.exactness import Cause, find_parting
from slime_rl.rollout.agent.template import Message
from slime_rl.rollout.agent.turns import TurnRenderer

USER: Message = {"role": "user", "content": "What is 2 + 3?"}
ANSWER: Message = {"role": "assistant", "content": "five"}
AGAIN: Message = {"role": "user", "content": "And 3 + 4?"}


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [call_of("calculator", x="2+3")]}
RESULTS: list[Message] = [
    {"role": "tool", "tool_call_id": "call00001", "name": "calculator", "content": "5"},
    {"role": "tool", "tool_call_id": "call00002", "name": "calculator", "content": ""},
]


@cache
def tokenizer(family: str) -> Any:
    return tokenizer_for(family, trained_bpe())


def renderer(family: str, tools: Any = None) -> TurnRenderer:
    return TurnRenderer(tokenizer(family), tools)


def rolled_out(turns: TurnRenderer, family: str, messages: list[Message]) -> tuple[list[int], list[int]]:
    """(ids, 1 for the policy's) of a conversation with a policy that knows its format."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ids = turns.prompt(messages[: places[0]])
    mask = [0] * len(ids)
    for number, place in enumerate(places):
        sampled = turns.encode(sampled_text(turns.template, family, messages, place))
        added: list[int] = []
        if number + 1 < len(places):
            added = turns.following(messages[place], sampled, messages[place + 1 : places[number + 1]])
        ids += sampled + added
        mask += [1] * len(sampled) + [0] * len(added)
    return ids, mask


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_r1"])
def test_ids_equal_the_whole_rendering_for_contents_that_no_template_changes(family: str) -> None:
    rng = random.Random(family)
    compared = 0
    while compared < 12:
        messages, tools = random_conversation(rng, plain=True)
        turns = renderer(family, tools)
        try:
            ids, mask = rolled_out(turns, family, messages)
        except ValueError as error:
            assert family == "llama3" and "one tool call" in str(error)
            continue
        parting = find_parting(turns, messages, ids, mask)
        if parting is not None:
            assert family == "qwen3" and parting.cause is Cause.HISTORY  # it leaves out earlier thoughts
        compared += 1


@pytest.mark.parametrize("family", list(FAMILIES))
def test_odd_contents_end_like_the_whole_rendering(family: str) -> None:
    rng = random.Random(family)
    compared = 0
    while compared < 12:
        messages, tools = random_conversation(rng)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(places) < 2 or (family == "llama3" and any(len(m.get("tool_calls", ())) > 1 for m in messages)):
            continue
        turns = renderer(family, tools)
        sampled = turns.encode(sampled_text(turns.template, family, messages, places[-2]))
        added = turns.following(messages[places[-2]], sampled, messages[places[-2] + 1 : places[-1]])
        whole = turns.whole(messages[: places[-1]], add_generation_prompt=True)
        assert whole[-len(added) :] == added
        compared += 1


def test_consecutive_tool_messages_share_a_turn_where_the_template_says_so() -> None:
    turns = renderer("qwen2_5", TOOLS)
    end = turns.tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = turns.tokenizer.decode(turns.following(CALLING, [end], RESULTS))
    responses = "\n<tool_response>\n5\n</tool_response>\n<tool_response>\n\n</tool_response>"
    assert text == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("five<|im_end|>", "\n<|im_start|>user"),  # the policy ended its turn
        ("five", "<|im_end|>\n<|im_start|>user"),  # a stop string or a limit did
        ("five<|endoftext|>", "<|im_end|>\n<|im_start|>user"),  # it ended in a way that the template does not know
    ],
)
def test_a_turn_is_ended_once(sampled: str, expected: str) -> None:
    turns = renderer("qwen2_5")
    assert turns.tokenizer.decode(turns.following(ANSWER, turns.encode(sampled), [AGAIN])).startswith(expected)


def test_an_end_token_that_is_the_next_role_is_not_written_twice() -> None:
    turns = renderer("glm4")
    text = turns.tokenizer.decode(turns.following(ANSWER, turns.encode("\nfive<|user|>"), [AGAIN]))
    assert text == "\nAnd 3 + 4?<|assistant|>"


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "object"), ("deepseek_v3", "string"), ("smollm2", "none")])
def test_what_a_template_takes_of_tool_calls_is_found_out(family: str, kind: str) -> None:
    assert renderer(family).template.arguments == kind


def test_arguments_reach_the_template_in_its_form() -> None:
    as_text = {**CALLING, "tool_calls": [{**CALLING["tool_calls"][0]}]}
    as_text["tool_calls"][0]["function"] = {"name": "calculator", "arguments": '{"x": "2+3"}'}
    for family in ("qwen2_5", "deepseek_v3", "glm4"):
        template = renderer(family, TOOLS).template
        assert template.text([USER, as_text], False) == template.text([USER, CALLING], False)
        assert '{"x": "2+3"}' in template.text([USER, CALLING], False)


def test_a_turn_costs_its_new_messages_whatever_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = renderer("qwen3", TOOLS)
    encoded: list[int] = []
    encode = turns.encode
    monkeypatch.setattr(turns, "encode", lambda text: encoded.append(len(text)) or encode(text))
    long_answer = {**CALLING, "content": "thought " * 5000}
    turns.following(long_answer, [1] * 20000, RESULTS)
    assert sum(encoded) < 400


def test_a_dropped_thought_is_named_as_the_templates_history() -> None:
    turns = renderer("qwen3")
    messages = [
        USER,
        {**ANSWER, "reasoning_content": "2 and 3 make 5"},
        AGAIN,
        {"role": "assistant", "content": "seven"},
    ]
    ids, mask = rolled_out(turns, "qwen3", messages)
    parting = find_parting(turns, messages, ids, mask)
    assert parting is not None and parting.cause is Cause.HISTORY
    assert parting.ours.startswith("<think>") or parting.ours.startswith("think")
    assert parting.template.startswith("five")


def test_another_spelling_by_the_policy_is_named_with_its_place() -> None:
    turns = renderer("qwen2_5")
    messages = [USER, {"role": "assistant", "content": "message"}, AGAIN, {"role": "assistant", "content": "seven"}]
    ids, mask = rolled_out(turns, "qwen2_5", messages)
    assert find_parting(turns, messages, ids, mask) is None
    place = mask.index(1)
    word = turns.encode("message")
    assert ids[place : place + len(word)] == word
    letters = [token for letter in "message" for token in turns.encode(letter)]
    spelled, spelled_mask = [*ids[:place], *letters, *ids[place + len(word) :]], [1] * len(letters)
    parting = find_parting(turns, messages, spelled, [*mask[:place], *spelled_mask, *mask[place + len(word) :]])
    assert parting is not None and (parting.position, parting.cause) == (place, Cause.SAMPLED)


def test_a_mistake_of_ours_is_not_put_on_the_template() -> None:
    turns = renderer("qwen2_5")
    messages = [USER, ANSWER, AGAIN, {"role": "assistant", "content": "seven"}]
    ids, mask = rolled_out(turns, "qwen2_5", messages)
    broken = ids.index(turns.encode("And")[0])
    parting = find_parting(turns, messages, [*ids[:broken], *ids[broken + 1 :]], [*mask[:broken], *mask[broken + 1 :]])
    assert parting is not None and parting.cause is Cause.RENDERED
