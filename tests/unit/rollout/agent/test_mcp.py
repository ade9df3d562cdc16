from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from factories import make_config

from slime_rl.rollout.agent.parsing import ToolCall
from slime_rl.rollout.agent.tools import ToolSet, tool_set

PROGRAM = str(Path(__file__).parent / "mcp_program.py")


@pytest.fixture
def tools(tmp_path: Path) -> ToolSet:
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"mcp": [{"command": [sys.executable, PROGRAM], "timeout_s": 1.0}]}))
    return tool_set(make_config(tmp_path, "--tool-config", str(path)).agent)


def call(tools: ToolSet, name: str) -> str:
    answer = asyncio.run(tools.call(ToolCall(name=name, arguments='{"x": 1}'), list(tools.tools)))
    return answer.text


def test_tools_of_a_server_are_called_and_their_failures_are_text(tools: ToolSet) -> None:
    assert {"calculator", "echo", "fail", "hang", "leave"} <= tools.tools.keys()
    assert tools.schemas(["echo"], "here")[0]["function"]["parameters"] == {"type": "object"}
    assert call(tools, "echo") == '{"x": 1}'
    assert call(tools, "fail") == 'Error: McpError: {"x": 1}'


def test_a_server_that_dies_is_started_again(tools: ToolSet) -> None:
    assert "has ended" in call(tools, "leave")
    assert call(tools, "echo") == '{"x": 1}'


def test_a_call_that_hangs_is_given_up(tools: ToolSet) -> None:
    started = time.monotonic()
    assert call(tools, "hang") == "Error: hang gave no answer within 1 s"
    assert time.monotonic() - started < 5.0


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
