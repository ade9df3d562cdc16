from __future__ import annotations

import time

import pytest

from slime_rl.rollout.rewards.answers import without_thinking
from slime_rl.rollout.rewards.code import program_of
from slime_rl.rollout.rewards.json_schema import json_text


@pytest.mark.parametrize(
    "response",
    [
        "a\n```python3\nprint(1)\n```\nDone",
        "a\r\n```python\r\nprint(1)\r\n```\r\nDone",
        "```python3\nprint(0)\n```\nThen\n```python3\nprint(1)\n```",
        "```python\nprint(1)\n```\nOutput:\n```\n1\n```",
        "```python\nprint(1)\n```\nOutput:\n```text\n1\n```",
        "Sure!\n```python\nprint(1)",
        "1. x\n   ```python\n   print(1)\n   ```",
        '```python title="a.py" {1}\nprint(1)\n```',
        "```{.python .numberLines}\nprint(1)\n```",
        "```Python:main.py\nprint(1)\n```",
        "~~~python\nprint(1)\n~~~",
        "````py\nprint(1)\n````",
        "```\nprint(1)\n```",
        "Here: ```python\nprint(1)\n```",
        "```python\nprint(1)```",
        "<think>```python\nprint(0)\n```</think>\n```python\nprint(1)\n```",
        "Use ```x``` or `y`.\n```python\nprint(1)\n```\nor ```z```",
    ],
)
def test_the_program_is_found_as_models_write_it(response: str) -> None:
    assert program_of(response) in ("print(1)\n", "print(1)\n\n")


@pytest.mark.parametrize("line", ["s = '''```'''", "print('</think>')", "s = 'a\x0cb\u2028c'", "s = '''\n~~~\n'''"])
def test_what_stands_in_a_program_does_not_end_it(line: str) -> None:
    assert program_of(f"```python\n{line}\nprint(1)\n```") == f"{line}\nprint(1)\n"


def test_thoughts_end_with_the_tag_that_closes_them() -> None:
    assert without_thinking("a</think>b") == "b"
    assert without_thinking("<think>a</think>b<think>c</think>d") == "d"
    assert without_thinking("<think>a</think>s = 'x</think>y'") == "s = 'x</think>y'"
    assert without_thinking('{"n": "</think>"}') == '{"n": "</think>"}'
    assert without_thinking("say '</think>' next</think>b") == "b"


def test_json_is_found_likewise() -> None:
    assert json_text('```json\r\n{"n": 1}\r\n```') == '{"n": 1}\n'
    assert json_text('~~~json\n{"n": 1}\n~~~\nAs in:\n```text\nx\n```') == '{"n": 1}\n'


@pytest.mark.parametrize(
    "text", ["`" * 200_000 + "a`", "```a" * 50_000, "```\n" * 50_000, "<think></think>" * 50_000, "\n" * 200_000]
)
def test_looking_for_blocks_is_linear_in_time(text: str) -> None:
    started = time.process_time()
    program_of(text)
    assert time.process_time() - started < 5.0, "of CPU time"
