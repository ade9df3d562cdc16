from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from factories import make_config
from scripted_engine import answer
from scripted_policy import TOKENIZER, calling, policy, tokens_of

from slime_rl.buffer.sources.prompts import check_prompt_lengths, prompt_from_row
from slime_rl.rollout.agent import agent_loop
from slime_rl.rollout.agent.builtin_tools import calculator, with_printed_end
from slime_rl.rollout.agent.parsing import MAX_DEPTH, ParsedTurn, ToolCall, depth_of, read_turn
from slime_rl.rollout.agent.tools import row_tools, schema_of, tool_set
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.generate import GENERATE_FUNCTIONS
from slime_rl.rollout.groups import encode_prompt
from slime_rl.types import Sample, Status

HERE = Path(__file__).parent
END = "<|im_end|>"


def run(tmp_path: Path, turns: list[Any], *flags: str, budget: int = 400, **metadata: Any) -> tuple[Sample, list[Any]]:
    """One sample with a scripted policy; (the sample, the requests)."""

    async def go() -> tuple[Sample, list[Any]]:
        async with policy(tmp_path, turns, *flags) as (config, received):
            sample = Sample(index=0, group_index=0, rollout_id=0, prompt="What is 17 * 3?", metadata=metadata)
            sample.set_prompt_tokens(encode_prompt(config, TOKENIZER, sample.prompt, metadata))
            while True:
                left = budget - sample.response_length
                assert await agent_loop(config, sample, {"max_new_tokens": left}) is sample
                if sample.status is not Status.ABORTED:
                    return sample, received

    return asyncio.run(go())


def test_a_schema_of_the_row_that_nothing_stands_behind_is_not_called_known(tmp_path: Path) -> None:
    ghost = {"type": "function", "function": {"name": "ghost", "parameters": {"type": "object", "properties": {}}}}
    sample, _ = run(tmp_path, [calling(("ghost", {})), "51" + END], tools=[ghost, "calculator"])
    assert contents(sample) == ["Error: there is no tool 'ghost'; known are calculator"]


def test_a_row_that_brings_what_an_episode_would_overwrite_is_refused(tmp_path: Path) -> None:
    def check(*flags: str) -> None:
        config = make_config(tmp_path, *flags)
        row = {"prompt": "hi", "label": "1", "metadata": {"agent": "mine"}}
        prompt = prompt_from_row(row, 2, "p.jsonl:3", config.data)
        check_prompt_lengths([prompt], lambda p: encode_prompt(config, TOKENIZER, p.prompt, p.metadata), 100, "error")

    check()
    for function in ("agent_loop", "slime_rl.rollout.agent:agent_loop"):
        with pytest.raises(ValueError, match=r"^p.jsonl:3: metadata\['agent'\] .*'mine'.*--bad-rows skip"):
            check("--generate-function-path", function)


@pytest.fixture(autouse=True)
def tools_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def tool_file(tmp_path: Path) -> str:
    path = tmp_path / "tools.yaml"
    seconds = dict.fromkeys(("leave", "long_text", "gathered", "broken_text", "leaving"), 60)
    seconds |= dict.fromkeys(("slow", "stubborn", "blocking"), 0.5)
    lines = [f"  - {{name: {name}, function: 'agent_tools:{name}', timeout_s: {s}}}" for name, s in seconds.items()]
    path.write_text("tools:\n" + "\n".join(lines) + "\n")
    return str(path)


def contents(sample: Sample, role: str = "tool") -> list[str]:
    return [m["content"] for m in sample.metadata["agent"]["messages"] if m["role"] == role]


def test_it_is_a_registered_generate_function() -> None:
    assert GENERATE_FUNCTIONS.load("agent_loop") is agent_loop
    assert GENERATE_FUNCTIONS.load("slime_rl.rollout.agent:agent_loop") is agent_loop


def test_a_call_is_answered_and_only_the_policys_tokens_are_trained(tmp_path: Path) -> None:
    first, last = calling(("calculator", {"expression": "17 * 3"})), "51" + END
    sample, requests = run(tmp_path, [first, last], "--tools", "calculator")
    tool_text = "\n<|im_start|>user\n<tool_response>\n51\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert sample.response_tokens == tokens_of(first) + tokens_of(tool_text) + tokens_of(last)
    a, b, c = len(tokens_of(first)), len(tokens_of(tool_text)), len(tokens_of(last))
    assert sample.loss_mask == [1] * a + [0] * b + [1] * c
    assert sample.weight_versions == [0] * a + [-1] * b + [0] * c
    assert [len(r["input_ids"]) for r in requests] == [sample.prompt_length, sample.prompt_length + a + b]
    assert sample.response == "51" and sample.status is Status.COMPLETED
    state = sample.metadata["agent"]
    assert (state["num_turns"], state["num_tool_calls"], state["num_tool_errors"]) == (2, 1, 0)
    assert (state["stop_reason"], state["parting"]) == ("stop", None)


def test_calls_of_one_turn_run_at_once_and_answer_in_order(tmp_path: Path) -> None:
    calls = calling(
        ("gathered", {"name": "a"}), ("calculator", {"expression": "1/3 + 2/3"}), ("gathered", {"name": "b"})
    )
    flags = ("--tool-config", tool_file(tmp_path))
    sample, _ = run(tmp_path, [calls, "ok" + END], *flags, tools=["gathered", "calculator"])
    assert contents(sample) == ['{"hello": "a"}', "1", '{"hello": "b"}']
    assert sample.metadata["agent"]["parting"] is None


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("slow", {"seconds": 600}), "Error: slow gave no answer within 0.5 s"),
        (("leave", {}), "Error: the process died"),
        (("calculator", {"expression": "1 / 0"}), "Error: ZeroDivisionError"),
        (("calculator", {"expression": "__import__('os')"}), "Error: ValueError: not arithmetic"),
        (("calculator", {"expression": "9**9**9"}), "Error: ValueError: the power"),
        (("calculator", {"wrong": 1}), "Error: TypeError"),
        (("search", {"x": 1}), "Error: there is no tool 'search'; known are calculator, leave, slow"),
        (("long_text", {}), "Error: there is no tool 'long_text'"),  # exists, but this row was not shown it
    ],
)
def test_what_goes_wrong_is_text_for_the_policy(
    tmp_path: Path, call: tuple[str, dict[str, Any]], expected: str
) -> None:
    flags = ("--tool-config", tool_file(tmp_path))
    sample, _ = run(tmp_path, [calling(call), "sorry" + END], *flags, tools=["slow", "leave", "calculator"])
    assert contents(sample)[0].startswith(expected)
    assert sample.status is Status.COMPLETED and sample.metadata["agent"]["num_tool_errors"] == 1


def test_a_call_that_cannot_be_read_is_answered_too(tmp_path: Path) -> None:
    turns = ["<tool_call>\n{oops\n</tool_call>" + END, "51" + END]
    sample, _ = run(tmp_path, turns, "--tools", "calculator")
    assert contents(sample)[0].startswith("Error: the tool call could not be read")
    assert sample.metadata["agent"]["num_tool_errors"] == 1 and sample.response == "51"


def test_the_last_allowed_turn_ends_a_talk_of_tools_only(tmp_path: Path) -> None:
    call = calling(("calculator", {"expression": "1"}))
    sample, requests = run(tmp_path, [call] * 9, "--tools", "calculator", "--max-turns", "3")
    assert len(requests) == 3 and sample.status is Status.TRUNCATED
    assert sample.metadata["agent"]["stop_reason"] == "max_turns"
    assert sample.loss_mask[-1] == 1  # no tool text behind the last turn


def test_no_turn_is_asked_for_when_the_answer_of_a_tool_uses_up_the_budget(tmp_path: Path) -> None:
    call = calling(("calculator", {"expression": "1"}))
    budget = len(tokens_of(call)) + 5
    sample, requests = run(tmp_path, [call] * 9, "--tools", "calculator", budget=budget)
    assert len(requests) == 1 and sample.response_length == len(tokens_of(call))
    assert (sample.status, sample.metadata["agent"]["stop_reason"]) == (Status.TRUNCATED, "max_tokens")


def test_a_turn_cut_off_by_the_budget_ends_the_episode(tmp_path: Path) -> None:
    sample, _ = run(tmp_path, [answer(tokens_of("thinking"), "thinking", reason="length")], "--tools", "calculator")
    assert (sample.status, sample.metadata["agent"]["stop_reason"]) == (Status.TRUNCATED, "max_tokens")


def test_an_interrupted_turn_goes_on_where_it_stopped(tmp_path: Path) -> None:
    call = tokens_of(calling(("calculator", {"expression": "17 * 3"})))
    turns = [answer(call[:9], reason="abort", version="4"), answer(call[9:], version="5"), "51" + END]
    sample, requests = run(tmp_path, turns, "--tools", "calculator")
    assert requests[1]["input_ids"] == sample.tokens[: sample.prompt_length] + call[:9]
    assert requests[1]["sampling_params"]["max_new_tokens"] == 400 - 9
    assert contents(sample) == ["51"] and sample.metadata["agent"]["parting"] is None
    assert sample.weight_versions[: len(call)] == [4] * 9 + [5] * (len(call) - 9)


def test_a_long_answer_of_a_tool_loses_its_middle(tmp_path: Path) -> None:
    flags = ("--tool-config", tool_file(tmp_path), "--max-tool-response-len", "20")
    sample, _ = run(tmp_path, [calling(("long_text", {"count": 300})), "ok" + END], *flags, tools=["long_text"])
    text = contents(sample)[0]
    assert text.startswith("word0 ") and text.endswith("word299") and "tokens left out" in text
    assert len(tokens_of(text)) < 60


def test_the_python_tool_prints_and_shows_its_errors(tmp_path: Path) -> None:
    programs = ("x = 6\nx * 7", "print(sum(range(10)))", "def f(:", "import socket; socket.socket()")
    calls = calling(*(("python", {"code": code}) for code in programs))
    sample, _ = run(tmp_path, [calls, "ok" + END], "--tools", "python", budget=3000)
    answers = contents(sample)
    assert answers[:2] == ["42", "45"] and "SyntaxError" in answers[2] and "PermissionError" in answers[3]


def test_calculator_is_exact() -> None:
    assert calculator("2**100 + 1") == str(2**100 + 1)
    assert calculator("(1 + 2) * -4 // 5") == "-3"
    assert calculator("1 / 4") == "0.25" and calculator("0.1 + 0.2") == repr(0.1 + 0.2)


def test_a_last_expression_is_printed_unless_it_is_none() -> None:
    assert with_printed_end("x = 1") == "x = 1"
    assert "print(_last)" in with_printed_end("1 + 1")


def test_schemas_come_from_signature_and_docstring(tmp_path: Path) -> None:
    async def go() -> Any:
        async with policy(tmp_path, [], "--tools", "calculator") as (config, _):
            return row_tools(config, {}), row_tools(config, {"tools": []})

    schemas, none = asyncio.run(go())
    assert none is None
    function = schemas[0]["function"]
    assert function["name"] == "calculator" and function["parameters"]["required"] == ["expression"]
    assert function["parameters"]["properties"] == {"expression": {"type": "string"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tools: 3", "must have a list under 'tools'"),
        ("tools: [{name: a}]", "entry 1: needs 'name' and 'function'"),
        ("tools: [{name: a, function: 'agent_tools:nothing'}]", "cannot load 'agent_tools:nothing'"),
        ("tools: [{name: a, function: 'agent_tools:slow', timeout_s: 0}]", "'timeout_s' must be > 0"),
        ("tools: [{name: a, function: 'agent_tools:odd'}]", "no JSON type for value"),
        (": :", "is not YAML"),
        ("tools: [{name: a, function: 'agent_tools:slow', timeout_s: abc}]", "entry 1: 'timeout_s' must be > 0"),
        ("tools: [{name: a, function: 'agent_tools:slow', timeout_s: null}]", "entry 1: 'timeout_s' must be > 0"),
        ("tools: [{name: a, function: 'agent_tools:slow', timeout_s: .nan}]", "entry 1: 'timeout_s' must be > 0"),
        ("mcp: [{command: [x], timeout_s: -1}]", "mcp entry 1: 'timeout_s' must be > 0"),
        ("tools: [{name: 5, function: 'agent_tools:slow'}]", "entry 1: 'name' must be a text, got 5"),
        ("tools: [{name: a, function: 5}]", "entry 1: 'function' must be a text, got 5"),
        ("tools: [{name: a, function: 'agent_tools:time'}]", "is a module, not a function"),
        ("tools: [{name: a, function: 'agent_tools:slow', schema: x}]", "entry 1: 'schema' is a schema with"),
        ("tools: [{name: a, function: 'agent_tools:slow', schema: {function: {name: b}}}]", "'schema' names 'b'"),
        ("tools: [{name: a, function: 'agent_tools:unreadable'}]", "type hints of 'a' cannot be read"),
        ("tools: [{name: calculator, function: 'agent_tools:slow'}]", "'calculator' is taken: it is built in"),
        (
            "tools: [{name: a, function: 'agent_tools:slow'}, {name: a, function: 'agent_tools:leave'}]",
            "'a' is taken: two entries have it",
        ),
    ],
)
def test_a_wrong_tool_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    from factories import make_config

    path = tmp_path / "tools.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"--tool-config {path}.*{message}"):
        tool_set(make_config(tmp_path, "--tool-config", str(path)).agent)


def test_a_tool_that_does_not_exist_is_named_with_its_flag(tmp_path: Path) -> None:
    from factories import make_config

    config = make_config(tmp_path, "--tools", "calc")
    with pytest.raises(ValueError, match=r"--tools: there is no tool 'calc'; known are calculator, python"):
        row_tools(config, {})


@pytest.mark.parametrize("entry", [5, {}, {"function": {"description": "x"}}, {"function": {"name": 5}}])
def test_a_tool_of_a_row_that_has_no_name_is_refused(tmp_path: Path, entry: Any) -> None:
    from factories import make_config

    with pytest.raises(ValueError, match=r"metadata\['tools'\]: a tool is a name or a schema with"):
        row_tools(make_config(tmp_path), {"tools": [entry]})


def test_schema_of_optional_parameters() -> None:
    import agent_tools

    assert sys.modules["agent_tools"] is agent_tools
    schema = schema_of(agent_tools.long_text, "long_text", "here")
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"count": {"type": "integer"}},
        "required": [],
    }


def test_all_turns_of_an_episode_ask_for_the_same_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []
    generate = EngineClient.generate

    async def recorded(self: EngineClient, ids: Any, params: Any, *, routing_key: str | None = None) -> Any:
        keys.append(routing_key)
        return await generate(self, ids, params, routing_key=routing_key)

    monkeypatch.setattr(EngineClient, "generate", recorded)
    run(tmp_path, [calling(("calculator", {"expression": "1"})), "1" + END], "--tools", "calculator")
    assert keys == ["0-0", "0-0"]


@pytest.mark.parametrize(
    "arguments",
    [{"x": "\ud800"}, {"\ud800": 1}, json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))],
)
def test_a_call_that_no_template_could_show_is_answered_as_an_error(tmp_path: Path, arguments: Any) -> None:
    turns = [calling(("calculator", arguments)), "ok" + END]
    sample, _ = run(tmp_path, turns, "--tools", "calculator", budget=2000)
    state = sample.metadata["agent"]
    assert contents(sample)[0].startswith("Error: the tool call could not be read")
    assert (state["num_tool_errors"], state["stop_reason"]) == (1, "stop")
    json.dumps(state, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "call", [{"name": {"a": 1}}, {"arguments": None}, {"name": "\ud800"}, {"arguments": '"\ud800"'}]
)
def test_a_call_that_a_parser_made_of_something_else_is_malformed(call: dict[str, Any]) -> None:
    class Parser:
        def parse(self, text: str, tools: Any) -> ParsedTurn:
            return ParsedTurn(content="", calls=[ToolCall(**{"name": "f", "arguments": "{}", **call})])

    parsed = read_turn(Parser(), "what it wrote", [])
    assert (parsed.content, parsed.calls, parsed.malformed) == ("what it wrote", [], True)


def test_depth_is_found_without_recursion() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert depth_of(deep) == 100_001 and depth_of({"a": [1, {"b": 2}]}) == 3 and depth_of("x") == 0


@pytest.mark.parametrize("arguments", ["[" * 100_000, "9" * 5000, '{"a": ' + "[" * 70 + "]" * 70 + "}", "null", '{"a"'])
def test_arguments_that_cannot_be_read_are_answered(tmp_path: Path, arguments: str) -> None:
    tools = tool_set(make_config(tmp_path).agent)
    answer = asyncio.run(tools.call(ToolCall(name="calculator", arguments=arguments), ["calculator"]))
    assert answer.failed and answer.text.startswith("Error: the arguments")


def test_a_tool_may_answer_text_that_is_no_unicode(tmp_path: Path) -> None:
    turns = [calling(("broken_text", {})), "ok" + END]
    sample, _ = run(tmp_path, turns, "--tools", "broken_text", "--tool-config", tool_file(tmp_path))
    assert contents(sample) == ["a?b"]


def call_here(tmp_path: Path, name: str, **arguments: Any) -> tuple[str, bool]:
    """The answer of an async tool, and whether the tool goes on behind it."""

    async def go() -> tuple[str, bool]:
        tools = tool_set(make_config(tmp_path, "--tool-config", tool_file(tmp_path)).agent)
        answer = await tools.call(ToolCall(name=name, arguments=json.dumps(arguments)), [name])
        return answer.text, len(asyncio.all_tasks()) > 1

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("exit", "Error: SystemExit: 3"),
        ("cancel", "Error: CancelledError: "),
        ("base", "Error: BaseException: boom"),
        ("circle", "Error: ValueError: Circular reference detected"),
    ],
)
def test_whatever_an_async_tool_raises_is_text(tmp_path: Path, kind: str, text: str) -> None:
    assert call_here(tmp_path, "leaving", kind=kind)[0] == text


def test_an_async_tool_is_not_waited_for_beyond_its_deadline(tmp_path: Path) -> None:
    text, goes_on = call_here(tmp_path, "stubborn")
    assert text == "Error: stubborn gave no answer within 0.5 s" and goes_on
    assert call_here(tmp_path, "blocking")[0] == "Error: blocking gave no answer within 0.5 s"


def test_an_async_tool_is_cancelled_with_its_episode(tmp_path: Path) -> None:
    async def go() -> int:
        tools = tool_set(make_config(tmp_path, "--tool-config", tool_file(tmp_path)).agent)
        arguments = '{"name": "x", "seconds": 600}'
        call = asyncio.create_task(tools.call(ToolCall(name="gathered", arguments=arguments), ["gathered"]))
        while len(asyncio.all_tasks()) < 3:  # the tool's own
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        for _ in range(3):  # what is cancelled ends in a round of the loop or two, without waiting for anything
            await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(go()) == 1
