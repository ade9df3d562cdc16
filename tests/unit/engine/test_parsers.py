"""SGLang's parsers behind our protocol; in a process of their own, because of what SGLang's import needs on CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import dataclasses, json
from slime_rl.engine.parsers import SglangParser

schema = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
texts = {
    "call": ("qwen25", None, 'so <tool_call>\\n{"name": "calc", "arguments": {"x": "1+2"}}\\n</tool_call>'),
    "broken": ("qwen25", None, '<tool_call>\\n{"name": "calc", "argum\\n</tool_call>'),
    "plain": ("qwen25", None, "just text"),
    "pythonic": ("pythonic", None, '[calc(x="1+2"), calc(x="3")]'),
    "null": ("qwen25", None, "<tool_call>\\nnull\\n</tool_call>"),
    "number": ("qwen25", None, "<tool_call>\\n5\\n</tool_call>"),
    "list": ("qwen25", None, "<tool_call>\\n[1]\\n</tool_call>"),
    "name": ("qwen25", None, '<tool_call>\\n{"name": {"a": 1}, "arguments": {}}\\n</tool_call>'),
    "deep": ("qwen25", None, "<tool_call>\\n" + "[" * 5000 + "\\n</tool_call>"),
    "digits": ("qwen25", None, '<tool_call>\\n{"name": "calc", "arguments": ' + "9" * 5000 + "}\\n</tool_call>"),
    "thought": ("qwen25", "qwen3", "<think>hm</think>five"),
}
found = {}
for name, (calls, reasoning, text) in texts.items():
    found[name] = dataclasses.asdict(SglangParser(calls, reasoning, "cpu").parse(text, [schema]))
try:
    SglangParser("qwen99", None, "cpu")
except ValueError as error:
    found["unknown"] = str(error)
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout.splitlines()[-1])


def test_calls_are_found_in_the_formats_that_sglang_knows(parsed: dict[str, Any]) -> None:
    assert parsed["call"]["calls"] == [{"name": "calc", "arguments": '{"x": "1+2"}'}]
    assert parsed["call"]["content"] == "so" and not parsed["call"]["malformed"]
    assert [json.loads(call["arguments"]) for call in parsed["pythonic"]["calls"]] == [{"x": "1+2"}, {"x": "3"}]


def test_a_call_that_cannot_be_read_is_said_to_be_one(parsed: dict[str, Any]) -> None:
    assert parsed["broken"]["malformed"] and parsed["broken"]["calls"] == []
    assert parsed["plain"] == {"content": "just text", "reasoning": "", "calls": [], "malformed": False}


@pytest.mark.parametrize("case", ["null", "number", "list", "name", "deep", "digits"])
def test_what_makes_a_format_stumble_is_a_malformed_call(parsed: dict[str, Any], case: str) -> None:
    assert parsed[case]["malformed"] and parsed[case]["calls"] == [] and "<tool_call>" in parsed[case]["content"]


def test_reasoning_is_taken_apart(parsed: dict[str, Any]) -> None:
    assert (parsed["thought"]["reasoning"], parsed["thought"]["content"]) == ("hm", "five")


def test_an_unknown_format_is_named_with_its_flag(parsed: dict[str, Any]) -> None:
    assert parsed["unknown"].startswith("--tool-call-parser must be") and "qwen25" in parsed["unknown"]
