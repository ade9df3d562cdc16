from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scripted_engine import answer
from scripted_policy import TOKENIZER, calling, policy, tokens_of

from slime_rl.rollout.agent.black_box import gateway
from slime_rl.rollout.agent.exactness import find_parting
from slime_rl.rollout.agent.gateway.anthropic_api import read_message
from slime_rl.rollout.agent.gateway.sessions import ROLE_STRIDE, Session, message_key
from slime_rl.rollout.agent.turns import TurnRenderer
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.scope import SampleScope, use_scope
from slime_rl.types import Sample, Status

END = "<|im_end|>"
USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
Talk = Callable[[Session, Any], Awaitable[Any]]


def talk(tmp_path: Path, turns: list[Any], body: Talk, *flags: str) -> tuple[Session, list[Any], Any]:
    """Run `body(session, post)` against a gateway; `post(path, json)` answers (status, content)."""

    async def go() -> tuple[Session, list[Any], Any]:
        async with policy(tmp_path, turns, *flags) as (_, received), aiohttp.ClientSession() as http:
            server = current_runtime().gateway
            assert server is not None
            sample = Sample(index=3, group_index=1, rollout_id=3, prompt="p", label="51")
            with server.session(sample, {"max_new_tokens": 100, "temperature": 0.7}) as session:

                async def post(path: str, content: Any, key: str = "") -> tuple[int, Any]:
                    headers = {"Authorization": f"Bearer {key or session.key}"}
                    async with http.post(server.base_url + path, json=content, headers=headers) as response:
                        text = await response.text()
                        return response.status, json.loads(
                            text
                        ) if response.content_type != "text/event-stream" else text

                result = await body(session, post)
            return session, received, result

    return asyncio.run(go())


async def chat(post: Any, *messages: Any, **options: Any) -> dict[str, Any]:
    status, content = await post("/chat/completions", {"model": "m", "messages": list(messages), **options})
    assert status == 200, content
    return content["choices"][0]["message"]


def test_a_linear_conversation_is_one_sample_of_the_ids_that_were_sampled(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> None:
        first = await chat(post, USER)
        assert first["content"] == "one"
        await chat(post, USER, first, MORE)

    session, requests, _ = talk(tmp_path, ["one" + END, answer(tokens_of("two" + END), version="7")], body)
    (sample,) = session.samples()
    assert requests[1]["input_ids"][: len(requests[0]["input_ids"])] == requests[0]["input_ids"]
    sampled = [t for t, m in zip(sample.response_tokens, sample.loss_mask, strict=True) if m]
    assert sampled == tokens_of("one" + END) + tokens_of("two" + END)
    assert sample.prompt_length == len(requests[0]["input_ids"]) and sample.weight_versions[-1] == 7
    assert [p for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m] == [-0.5] * len(sampled)
    messages = [USER, {"role": "assistant", "content": "one"}, MORE, {"role": "assistant", "content": "two"}]
    mask = [0] * sample.prompt_length + sample.loss_mask
    assert find_parting(TurnRenderer(TOKENIZER), messages, sample.tokens, mask) is None
    assert (sample.response, sample.status, sample.rollout_id) == ("two", Status.COMPLETED, 3)


def test_branches_share_a_rollout_id_and_train_every_token_once(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> None:
        first = await chat(post, USER)
        await chat(post, USER, first, MORE)
        await chat(post, USER, first, {"role": "user", "content": "otherwise"})
        await chat(post, {"role": "user", "content": "a compacted context"})

    session, _, _ = talk(tmp_path, [f"{word}{END}" for word in ("one", "two", "three", "four")], body)
    samples = session.samples()
    trained = [TOKENIZER.decode([t for t, m in zip(s.response_tokens, s.loss_mask, strict=True) if m]) for s in samples]
    assert trained == [f"one{END}two{END}", f"three{END}", f"four{END}"]
    assert {s.rollout_id for s in samples} == {3} and {s.index for s in samples} == {3}
    assert [s.metadata["agent"]["num_branches"] for s in samples] == [3, 3, 3]


def test_calls_of_a_session_have_seeds_of_their_own_in_any_order(tmp_path: Path) -> None:
    def seeds(params: dict[str, Any], contents: str) -> list[tuple[str, int]]:
        async def body(session: Session, post: Any) -> None:
            session.params |= params
            for content in contents:
                await chat(post, {"role": "user", "content": content})

        _, requests, _ = talk(tmp_path, ["one" + END] * len(contents), body)
        found = [request["sampling_params"].get("sampling_seed") for request in requests]
        return sorted(zip(contents, found, strict=True))

    first = seeds({"sampling_seed": 5}, "aaabb")
    assert len({seed for _, seed in first}) == 5
    assert first == seeds({"sampling_seed": 5}, "babaa")
    assert not {seed for _, seed in first} & {seed for _, seed in seeds({"sampling_seed": 6}, "aaabb")}
    assert seeds({}, "a") == [("a", None)]


def test_tool_calls_come_in_the_apis_form_and_their_answers_continue_the_turn(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}

    async def body(session: Session, post: Any) -> dict[str, Any]:
        first = await chat(post, USER, tools=[tool])
        assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"expression": "17*3"}
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "51"}
        await chat(post, USER, first, result, tools=[tool])
        return first

    session, _, first = talk(tmp_path, [calling(("calculator", {"expression": "17*3"})), "51" + END], body)
    assert first["content"] is None
    (sample,) = session.samples()
    assert sample.metadata["agent"]["num_turns"] == 2 and sample.metadata["agent"]["num_tool_calls"] == 1
    assert "<tool_response>\n51\n</tool_response>" in TOKENIZER.decode(sample.response_tokens)


def test_a_stream_carries_the_same_answer(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> str:
        status, text = await post("/chat/completions", {"messages": [USER], "stream": True, **more})
        assert status == 200
        return text

    more: dict[str, Any] = {}
    _, _, text = talk(tmp_path, ["one two" + END], body)
    assert "usage" not in text, "only who asks for it gets a chunk without choices"
    more = {"stream_options": {"include_usage": True}}
    session, _, text = talk(tmp_path, ["one two" + END], body)
    lines = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "one two"
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens_of("one two" + END))
    assert len(session.samples()) == 1


def test_anthropic_messages_with_tools(tmp_path: Path) -> None:
    tool = {"name": "calculator", "input_schema": {"type": "object", "properties": {}}}

    async def body(session: Session, post: Any) -> Any:
        request = {"model": "m", "max_tokens": 50, "system": "be brief", "messages": [USER], "tools": [tool]}
        status, first = await post("/messages", request)
        assert status == 200 and first["stop_reason"] == "tool_use"
        use = first["content"][0]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "calculator", {"expression": "17*3"})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "51"}]}
        later = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        status, second = await post("/messages", {**request, "messages": later})
        return second

    turns = [calling(("calculator", {"expression": "17*3"})), "51" + END]
    session, requests, second = talk(tmp_path, turns, body)
    assert second["stop_reason"] == "end_turn" and second["content"] == [{"type": "text", "text": "51"}]
    assert requests[0]["sampling_params"] == {"max_new_tokens": 50, "temperature": 0.7}
    assert len(session.samples()) == 1


def test_an_anthropic_stream_ends_with_its_reason(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> str:
        return (await post("/messages", {"messages": [USER], "max_tokens": 9, "stream": True}))[1]

    _, _, text = talk(tmp_path, ["one" + END], body)
    events = [json.loads(block.split("\ndata: ")[1]) for block in text.strip().split("\n\n")]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"] == ["one"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


def test_what_cannot_be_answered_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> list[tuple[int, Any]]:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
        bodies: list[Any] = [{"messages": []}, {"messages": [USER], "n": 2}, {"messages": [image]}, [1]]
        refused = [await post("/chat/completions", b) for b in bodies]
        refused.append(await post("/chat/completions", {"messages": [USER]}, key="session-of-nobody"))
        session.finish()
        refused.append(await post("/chat/completions", {"messages": [USER]}))
        return refused

    session, requests, refused = talk(tmp_path, [], body)
    assert [status for status, _ in refused] == [400, 400, 400, 400, 401, 409]
    assert all(content["error"]["message"] for _, content in refused) and requests == []
    with pytest.raises(ValueError, match="without a call of the gateway"):
        session.samples()


def test_an_answer_that_an_abort_breaks_off_goes_on(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> dict[str, Any]:
        return await chat(post, USER)

    parts = [answer(tokens_of("on"), reason="abort", version="1"), answer(tokens_of("e" + END), version="2")]
    session, requests, message = talk(tmp_path, parts, body)
    assert message["content"] == "one"
    assert requests[1]["input_ids"] == requests[0]["input_ids"] + tokens_of("on")
    n, m = len(tokens_of("on")), len(tokens_of("e" + END))
    assert session.samples()[0].weight_versions == [1] * n + [2] * m


def test_the_reward_can_be_posted(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> list[Any]:
        await chat(post, USER)
        return [await post("/session/reward", {"reward": r, "finish": True}) for r in ("high", 0.25)]

    session, _, answers = talk(tmp_path, ["one" + END], body)
    assert answers[0][0] == 400 and answers[1] == (200, {"reward": 0.25, "finished": True})
    assert session.samples()[0].metadata["agent"]["reward"] == 0.25


async def counting_agent(data: dict[str, Any], base_url: str, api_key: str) -> float | None:
    url, headers = f"{base_url}/chat/completions", {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json={"messages": [USER]}) as response:
        response.raise_for_status()
        content = (await response.json())["choices"][0]["message"]["content"]
    return float(content == data["label"])


async def silent_agent(data: dict[str, Any], base_url: str, api_key: str) -> float | None:
    return 1.0


def run_agent(tmp_path: Path, path: str, turns: list[Any], scope: SampleScope | None = None) -> Any:
    async def go() -> Any:
        async with policy(tmp_path, turns, "--agent-path", path) as (config, _):
            sample = Sample(index=0, group_index=0, rollout_id=0, prompt="What is 17*3?", label="51")
            sample.set_prompt_tokens([1])
            if scope is None:
                return await gateway(config, sample, {"max_new_tokens": 200})
            with use_scope(scope):
                return await gateway(config, sample, {"max_new_tokens": 200})

    return asyncio.run(go())


def test_an_agent_with_a_plain_http_client_is_a_generate_function(tmp_path: Path) -> None:
    (sample,) = run_agent(tmp_path, "test_gateway:counting_agent", ["51" + END])
    assert sample.metadata["agent"]["reward"] == 1.0


def test_an_agent_that_makes_no_call_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a call of the gateway"):
        run_agent(tmp_path, "test_gateway:silent_agent", [])


async def agent_that_takes_errors_for_answers(data: dict[str, Any], base_url: str, api_key: str) -> float:
    try:
        return float(await counting_agent(data, base_url, api_key))
    except Exception:
        return 0.0


@pytest.mark.parametrize("agent", ["counting_agent", "agent_that_takes_errors_for_answers"])
def test_an_interrupted_agent_starts_anew_later(tmp_path: Path, agent: str) -> None:
    scope = SampleScope()
    scope.interrupt(0.0)
    sample = run_agent(tmp_path, f"test_gateway:{agent}", [], scope)
    assert sample.status is Status.ABORTED and sample.response_length == 0


def test_the_official_openai_client_runs_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    turns = [calling(("calculator", {"expression": "17*3"})), "51" + END]
    (sample,) = run_agent(tmp_path, "plugins.agents.openai_calculator:run", turns)
    assert sample.metadata["agent"]["reward"] == 1.0 and sample.metadata["agent"]["num_turns"] == 2
    assert sum(sample.loss_mask) == len(tokens_of(turns[0])) + len(tokens_of(turns[1]))


def test_both_sides_of_a_game_are_episodes_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    samples = run_agent(tmp_path, "plugins.agents.nim_self_play:run", [f"{n}{END}" for n in (3, 2, 3, 3, 1)])
    first, second = samples = sorted(samples, key=lambda sample: sample.metadata["agent"]["role"])
    assert [s.metadata["agent"]["role"] for s in samples] == ["first", "second"]
    assert [s.metadata["agent"]["reward"] for s in samples] == [1.0, -1.0]
    assert [s.metadata["agent"]["num_turns"] for s in samples] == [3, 2]
    assert second.rollout_id - first.rollout_id == ROLE_STRIDE and second.group_index == first.group_index
    text = TOKENIZER.decode(second.tokens)
    assert "9 left" in text and "12 left" not in text, "a side sees its own conversation only"


def test_who_loses_with_the_first_move_has_no_opponent_to_reward(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    (only,) = run_agent(tmp_path, "plugins.agents.nim_self_play:run", [f"seven{END}"])
    assert only.metadata["agent"]["reward"] == -1.0


def test_a_reward_may_be_posted_for_a_role(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> None:
        await chat(post, USER, model="policy/judge")
        await chat(post, USER, model="gpt-4")
        await post("/session/reward", {"reward": 0.25, "role": "judge"})
        await post("/session/reward", {"reward": 1.0})

    session, _, _ = talk(tmp_path, ["a" + END, "b" + END], body)
    found = [(s.metadata["agent"]["role"], s.metadata["agent"]["reward"]) for s in session.samples()]
    assert found == [("judge", 0.25), ("", 1.0)]
    session.role_rewards["nobody"] = 1.0
    with pytest.raises(ValueError, match=r"\['nobody'\], which made no call as model policy/ROLE"):
        session.samples()


def test_messages_are_the_same_whatever_a_client_makes_of_their_form() -> None:
    function = {"name": "f", "arguments": '{"b": 1, "a": 2}'}
    given = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]}
    echoed = {**given, "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2, "b": 1}}}]}
    assert message_key(given) == message_key(echoed)
    assert message_key({"role": "user", "content": "a"}) != message_key({"role": "user", "content": "b"})


def test_anthropic_results_come_before_the_text_beside_them() -> None:
    blocks = [{"type": "text", "text": "so?"}, {"type": "tool_result", "tool_use_id": "x", "content": "51"}]
    read = read_message({"role": "user", "content": blocks})
    assert [m["role"] for m in read] == ["tool", "user"] and read[1]["content"] == "so?"


async def responses_agent(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Two turns on the responses API: a call by its items, a further question by the response's id."""
    from openai import AsyncOpenAI

    tool: Any = {"type": "function", "name": "calculator", "parameters": {"type": "object", "properties": {}}}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        items: list[Any] = [{"role": "user", "content": data["prompt"]}]
        first = await client.responses.create(model="policy", input=items, tools=[tool], instructions="be brief")
        (call,) = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "51"})
        second = await client.responses.create(model="policy", input=items, tools=[tool], instructions="be brief")
        assert second.output_text == data["label"], second
        events = [
            event
            async for event in await client.responses.create(
                model="policy",
                input="sure?",
                previous_response_id=second.id,
                tools=[tool],
                instructions="be brief",
                stream=True,
            )
        ]
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "yes"
    return 1.0


def test_the_responses_api_of_the_official_client(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    turns = [calling(("calculator", {"expression": "17*3"})), "51" + END, "yes" + END]
    (sample,) = run_agent(tmp_path, "test_gateway:responses_agent", turns)
    assert sample.metadata["agent"]["num_turns"] == 3
    text = TOKENIZER.decode(sample.tokens)
    assert text.count("be brief") == 1 and "<tool_response>\n51\n</tool_response>" in text


def test_a_response_that_the_session_did_not_give_is_refused(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> Any:
        return await post("/responses", {"input": "hi", "previous_response_id": "resp_0"})

    _, _, (status, content) = talk(tmp_path, [], body)
    assert status == 404 and "none of this session" in content["error"]["message"]


WRONG: dict[str, tuple[str, Any]] = {
    "max_tokens text": ("/chat/completions", {"messages": [USER], "max_tokens": "abc"}),
    "max_tokens -5": ("/chat/completions", {"messages": [USER], "max_tokens": -5}),
    "max_tokens 0": ("/chat/completions", {"messages": [USER], "max_tokens": 0}),
    "stop": ("/chat/completions", {"messages": [USER], "stop": 5}),
    "stream": ("/chat/completions", {"messages": [USER], "stream": "false"}),
    "tools text": ("/chat/completions", {"messages": [USER], "tools": "abc"}),
    "tools list": ("/chat/completions", {"messages": [USER], "tools": [1]}),
    "tool without name": ("/chat/completions", {"messages": [USER], "tools": [{"function": {}}]}),
    "tool_calls": ("/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": "x"}]}),
    "custom call": (
        "/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}, USER]},
    ),
    "content": ("/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    "part": ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
    "role": ("/chat/completions", {"messages": [{"role": "narrator", "content": "x"}]}),
    "surrogate": ("/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
    "message": ("/chat/completions", {"messages": ["x"]}),
    "deep": ("/chat/completions", {"messages": [USER], "metadata": json.loads("[" * 200 + "]" * 200)}),
    "a message": ("/messages", {"messages": ["x"], "max_tokens": 5}),
    "a no role": ("/messages", {"messages": [{"content": "x"}], "max_tokens": 5}),
    "a block": ("/messages", {"messages": [{"role": "user", "content": [{"text": "x"}]}], "max_tokens": 5}),
    "a server tool": (
        "/messages",
        {"messages": [USER], "tools": [{"type": "web_search", "name": "x"}], "max_tokens": 5},
    ),
    "a system": ("/messages", {"messages": [USER], "system": 5, "max_tokens": 5}),
    "a count": ("/messages/count_tokens", {"messages": []}),
    "r role": ("/responses", {"input": [{"content": "x"}]}),
    "r call": ("/responses", {"input": [{"type": "function_call", "name": "x", "call_id": "1"}]}),
    "r instructions": ("/responses", {"input": "x", "instructions": 5}),
    "r tools": ("/responses", {"input": "x", "tools": ["abc"]}),
    "r previous": ("/responses", {"input": "x", "previous_response_id": ["a"]}),
    "reward nan": ("/session/reward", {"reward": float("nan")}),
    "reward list": ("/session/reward", [1]),
    "reward role": ("/session/reward", {"reward": 1, "role": "nobody"}),
    "reward role list": ("/session/reward", {"reward": 1, "role": [1]}),
    "reward huge": ("/session/reward", {"reward": 10**400}),
    "finish": ("/session/reward", {"reward": 1, "finish": "no"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_in_the_form_of_its_api(tmp_path: Path, case: str) -> None:
    async def body(session: Session, post: Any) -> Any:
        return await post(*WRONG[case])

    session, requests, (status, content) = talk(tmp_path, [], body)
    assert status == 400 and content["error"]["type"] == "invalid_request_error", content
    assert (content.get("type") == "error") == WRONG[case][0].startswith("/messages")
    assert content["error"]["message"] and requests == [] and session.turns == []


def test_what_the_engine_refuses_is_the_clients_to_hear(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> Any:
        missing = await post("/nowhere", {})
        return missing, await post("/messages", {"messages": [USER]})

    _, requests, ((no_path, _), (status, content)) = talk(tmp_path, [400], body)
    assert no_path == 404 and len(requests) == 1
    assert status == 400 and "refused the request: HTTP 400" in content["error"]["message"]


def test_a_client_that_goes_away_leaves_no_branch(tmp_path: Path) -> None:
    asked, released = asyncio.Event(), asyncio.Event()

    async def late() -> Any:
        asked.set()
        await released.wait()
        return answer(tokens_of("late" + END))

    async def body(session: Session, post: Any) -> None:
        first = asyncio.create_task(post("/chat/completions", {"messages": [USER]}))
        await asked.wait()
        first.cancel()
        await asyncio.wait({first})
        assert (await chat(post, USER))["content"] == "quick"
        released.set()
        await asyncio.sleep(0.5)  # for an answer that nobody must hear

    session, requests, _ = talk(tmp_path, [late(), "quick" + END], body)
    assert len(requests) == 2 and [turn.answer["content"] for turn in session.turns] == ["quick"]
    assert len(session.samples()) == 1


def test_without_tool_choice_a_call_is_text_and_the_conversation_goes_on(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
    written = calling(("calculator", {}))

    async def body(session: Session, post: Any) -> None:
        first = await chat(post, USER, tools=tools, tool_choice="none")
        assert "tool_calls" not in first and first["content"] + END == written
        second = await chat(post, USER, first, MORE, tools=tools)
        assert second["tool_calls"]

    session, _, _ = talk(tmp_path, [written, written], body)
    assert len(session.samples()) == 1


@pytest.mark.parametrize("merged", [True, False])
def test_the_begin_of_an_answer_is_continued_behind_a_turn_too(tmp_path: Path, merged: bool) -> None:
    begun = {"role": "assistant", "content": "Pre"}

    async def body(session: Session, post: Any) -> None:
        first = await chat(post, USER)
        second = await chat(post, USER, first, MORE, begun)
        assert second["content"] == "fix"
        whole = [{"role": "assistant", "content": "Prefix"}] if merged else [begun, second]
        await chat(post, USER, first, MORE, *whole, USER)

    session, requests, _ = talk(tmp_path, ["one" + END, "fix" + END, "three" + END], body)
    assert TOKENIZER.decode(requests[1]["input_ids"]).endswith("more<|im_end|>\n<|im_start|>assistant\nPre")
    assert len(session.samples()) == (1 if merged else 2)
    if merged:
        messages = [
            USER,
            {"role": "assistant", "content": "one"},
            MORE,
            {"role": "assistant", "content": "Prefix"},
            USER,
        ]
        assert TOKENIZER.decode(requests[2]["input_ids"]) == TurnRenderer(TOKENIZER).template.text(messages, True)


def test_anthropic_arguments_that_are_no_object_stay_in_the_conversation(tmp_path: Path) -> None:
    tools = [{"name": "calculator", "input_schema": {"type": "object"}}]
    written = calling(("calculator", [1, 2]))  # type: ignore[arg-type]

    async def body(session: Session, post: Any) -> None:
        _, first = await post("/messages", {"messages": [USER], "tools": tools})
        (block,) = first["content"]
        assert block["input"] == {"arguments": "[1, 2]"}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "no"}]}
        messages = [USER, {"role": "assistant", "content": first["content"]}, result]
        _, counted = await post("/messages/count_tokens", {"messages": messages, "tools": tools})
        _, second = await post("/messages", {"messages": messages, "tools": tools})
        assert second["usage"]["input_tokens"] == counted["input_tokens"]

    session, requests, _ = talk(tmp_path, [written, "two" + END], body)
    assert len(session.samples()) == 1 and len(requests) == 2


def test_a_model_can_be_asked_for_by_its_name(tmp_path: Path) -> None:
    async def go() -> Any:
        async with policy(tmp_path, []), aiohttp.ClientSession() as http:
            server = current_runtime().gateway
            assert server is not None
            async with http.get(server.base_url + "/models/policy/judge") as response:
                return await response.json()

    assert asyncio.run(go())["id"] == "policy/judge"


def test_a_stop_text_ends_the_answer_and_is_not_shown(tmp_path: Path) -> None:
    turns = ["think\nObservation:", "done" + END, answer(tokens_of("a Stop b"), reason="length"), "x Stop"]

    async def body(session: Session, post: Any) -> Any:
        first = await chat(post, USER, stop=["Observation:", "Stop"])
        assert first["content"] == "think\n"
        await chat(post, USER, first, MORE, stop="Stop")
        assert (await chat(post, MORE, stop="Stop"))["content"] == "a Stop b", "cut at its length, not by the text"
        asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "y"}], "stop_sequences": ["Stop"]}
        return (await post("/messages", asked))[1]

    session, _, told = talk(tmp_path, turns, body)
    assert (told["content"], told["stop_reason"]) == ([{"type": "text", "text": "x "}], "stop_sequence")
    assert told["stop_sequence"] == "Stop" and len(session.samples()) == 3, "the second call continues the first"
    trained = [
        t for t, m in zip(session.samples()[0].response_tokens, session.samples()[0].loss_mask, strict=True) if m
    ]
    assert trained == tokens_of(turns[0]) + tokens_of(turns[1]), "what was sampled is what is trained on"


async def editing_agent(data: dict[str, Any], base_url: str, api_key: str) -> float:
    await counting_agent(data, base_url, api_key)
    data["prompt"].append({"role": "assistant", "content": "51"})
    data["metadata"]["seen"].append("51")
    return 1.0


async def odd_roles(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    await counting_agent(data, base_url, api_key)
    return {"": 1.0, None: 2.0}


async def endless_reward(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    await counting_agent(data, base_url, api_key)
    headers = {"Authorization": f"Bearer {api_key}"}
    for reward in (10**400, 1e39):
        body, url = {"reward": reward}, f"{base_url}/session/reward"
        async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as response:
            assert response.status == 400
    return 10**400


@pytest.mark.parametrize(
    ("name", "message"),
    [("odd_roles", "rewards by the names of roles, got {'': 1.0, None"), ("endless_reward", "finite number or None")],
)
def test_odd_rewards_of_an_agent_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--agent-path test_gateway:{name} must return .*{message}"):
        run_agent(tmp_path, f"test_gateway:{name}", ["51" + END])


def test_what_an_agent_does_with_its_row_stays_with_it(tmp_path: Path) -> None:
    row = Sample(index=0, group_index=0, rollout_id=0, prompt=[USER], label="51", metadata={"seen": []})

    async def go() -> Any:
        flags = ("--agent-path", "test_gateway:editing_agent")
        async with policy(tmp_path, ["51" + END], *flags) as (config, _):
            return await gateway(config, row, {"max_new_tokens": 50})

    (sample,) = asyncio.run(go())
    assert row.prompt == sample.prompt == [USER] and row.metadata == {"seen": []}


def test_a_turn_holds_its_own_part_only(tmp_path: Path) -> None:
    async def body(session: Session, post: Any) -> None:
        messages: list[Any] = [USER]
        for _ in range(20):
            messages += [await chat(post, *messages), MORE]

    session, requests, _ = talk(tmp_path, [f"answer {n}{END}" for n in range(20)], body)
    assert sum(len(t.added) + len(t.sampled) for t in session.turns) == len(session.turns[-1].ids)
    assert sum(len(turn.keys) for turn in session.turns) == 40
    assert session.turns[-1].ids[: session.turns[-1].num_prompt_tokens] == requests[-1]["input_ids"]
    (sample,) = session.samples()
    assert sample.tokens == session.turns[-1].ids and len(sample.rollout_log_probs) == len(sample.loss_mask)


def test_a_call_of_the_policy_that_cannot_be_shown_is_text_for_the_agent(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]

    async def body(session: Session, post: Any) -> None:
        first = await chat(post, USER, tools=tools)
        assert "tool_calls" not in first and "ud800" in first["content"]
        await chat(post, USER, first, MORE, tools=tools)

    session, _, _ = talk(tmp_path, [calling(("calculator", {"x": "\ud800"})), "ok" + END], body)
    assert len(session.samples()) == 1
