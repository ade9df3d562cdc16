from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from pathlib import Path

import pytest
from factories import make_config

from slime_rl.rollout.agent.parsing import ToolCall
from slime_rl.rollout.agent.tools import ToolSet, tool_set

PROGRAM = str(Path(__file__).parent / "mcp_program.py")


@pytest.fixture
def tools(tmp_path: Path) -> ToolSet:
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"mcp": [{"command": [sys.executable, PROGRAM], "timeout_s": 60.0}]}))
    return tool_set(make_config(tmp_path, "--tool-config", str(path)).agent)


def call(tools: ToolSet, name: str) -> str:
    answer = asyncio.run(tools.call(ToolCall(name=name, arguments='{"x": 1}'), list(tools.tools)))
    return answer.text


def patience(tools: ToolSet, name: str, seconds: float) -> None:
    tools.tools[name] = dataclasses.replace(tools.tools[name], timeout_s=seconds)


def test_tools_of_a_server_are_called_and_their_failures_are_text(tools: ToolSet) -> None:
    assert {"calculator", "echo", "fail", "hang", "leave"} <= tools.tools.keys()
    assert tools.schemas(["echo"], "here")[0]["function"]["parameters"] == {"type": "object"}
    assert call(tools, "echo") == '{"x": 1}'
    assert call(tools, "fail") == 'Error: McpError: {"x": 1}'


def test_a_server_that_dies_is_started_again(tools: ToolSet) -> None:
    assert "has ended" in call(tools, "leave")
    assert call(tools, "echo") == '{"x": 1}'


def test_a_call_that_hangs_is_given_up(tools: ToolSet) -> None:
    patience(tools, "hang", 0.5)
    assert call(tools, "hang") == "Error: hang gave no answer within 0.5 s"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"command": "python"}, "mcp entry 1: needs 'command' \\(a list\\)"),
        ({"command": ["/nowhere/at-all"]}, "mcp entry 1: McpError: cannot start"),
        ({"command": [sys.executable, "-c", "pass"]}, "mcp entry 1: McpError: .* has ended"),
    ],
)
def test_a_server_that_cannot_be_had_is_named(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"mcp": [entry]}))
    with pytest.raises(ValueError, match=message):
        tool_set(make_config(tmp_path, "--tool-config", str(path)).agent)


def hostile(tmp_path: Path, kind: str) -> ToolSet:
    command = [sys.executable, str(Path(PROGRAM).with_name("mcp_hostile.py")), kind]
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"mcp": [{"command": command, "timeout_s": 60.0}]}))
    return tool_set(make_config(tmp_path, "--tool-config", str(path)).agent)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lines", "fine"),
        ("asks", "fine"),
        ("error", "Error: McpError: bad"),
        ("null", "Error: McpError: tools/call must give an object, got None"),
        ("content", "Error: McpError: the content of an answer must be a list, got 'x'"),
        ("part", "[text]\n[int]"),
        ("structured", '{"a": 1}'),
    ],
)
def test_a_server_that_answers_oddly_does_not_stop_its_reader(tmp_path: Path, kind: str, text: str) -> None:
    tools = hostile(tmp_path, kind)
    assert [call(tools, "e"), call(tools, "e")] == [text, text]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("endless", "tools/list has more than 100 pages"),
        ("names", "a tool must be an object with a name, got 'e'"),
        ("nameless", "a tool must be an object with a name"),
        ("none", "must give a list of tools, got None"),
    ],
)
def test_a_list_of_tools_that_is_odd_is_named(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"mcp entry 1: McpError: .*{message}"):
        hostile(tmp_path, kind)


def test_a_server_that_does_not_read_holds_one_thread_and_is_started_again(tmp_path: Path) -> None:
    tools = hostile(tmp_path, "deaf")
    before = threading.active_count()
    large = json.dumps({"x": "y" * 1_000_000})

    async def go() -> list[str]:
        patience(tools, "e", 1.0)
        answers = [await tools.call(ToolCall(name="e", arguments=large), ["e"])]
        patience(tools, "e", 60.0)
        answers += await asyncio.gather(*(tools.call(ToolCall(name="e", arguments="{}"), ["e"]) for _ in range(3)))
        return [answer.text for answer in answers]

    assert asyncio.run(go()) == ["Error: e gave no answer within 1 s"] + ["fine"] * 3
    assert threading.active_count() <= before + 1
