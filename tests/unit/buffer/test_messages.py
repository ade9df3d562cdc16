from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.buffer.sources import FilePromptSource, check_prompt_lengths
from slime_rl.types import Prompt

USER = {"role": "user", "content": "x"}


def read(tmp_path: Path, text: str, *flags: str) -> FilePromptSource:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return FilePromptSource(make_config(tmp_path, "--prompt-data", str(path), *flags))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": 5, "content": "x"}, "'role' must be text, got int 5"),
        ({"role": None, "content": "x"}, "'role' must be text, got NoneType None"),
        ({"role": "user", "content": None}, "'content' must be text or a list of parts"),
        ({"role": "tool", "content": 5}, "'content' must be text or a list of parts"),
        ({"role": "user", "content": {"a": 1}}, "'content' must be text or a list of parts"),
        ({"role": "user", "content": ["x", 5]}, "'content' must be text or a list of parts"),
    ],
)
def test_a_message_that_a_template_would_write_as_something_else_is_a_bad_row(
    tmp_path: Path, message: dict[str, Any], problem: str
) -> None:
    text = json.dumps({"prompt": [USER, message], "label": "1"}) + "\n" + json.dumps({"prompt": [USER], "label": "2"})
    where = re.escape(f"rows.jsonl:1: 'prompt' (--input-key): message 1: {problem}")
    with pytest.raises(ValueError, match=where):
        read(tmp_path, text)
    assert [p.label for _, p in read(tmp_path, text, "--bad-rows", "skip").next_prompts(2)] == ["2", "2"]


def test_parts_and_a_call_of_tools_without_text_are_messages(tmp_path: Path) -> None:
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    source = read(tmp_path, json.dumps({"prompt": prompt, "label": "1"}))
    assert source.next_prompts(1)[0][1].prompt == prompt


def test_a_label_that_is_nan_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 'label' \(--label-key\) is NaN"):
        read(tmp_path, '{"prompt": "a", "label": NaN}')


def no_system(prompt: Prompt) -> list[int]:
    if isinstance(prompt.prompt, list) and prompt.prompt[0]["role"] == "system":
        raise ValueError("the chat template rejects this prompt: no system here")
    return [1]


def no_template(prompt: Prompt) -> list[int]:
    raise ValueError("--apply-chat-template: no template")


MIXED = "".join(
    json.dumps({"prompt": [{"role": role, "content": "x"}], "label": role}) + "\n"
    for role in ("system", "user", "system")
)


@pytest.mark.parametrize("check_rows", ["0", "1"])  # all at the start; the last when it is drawn
def test_a_prompt_that_the_template_rejects_is_a_bad_row(tmp_path: Path, check_rows: str) -> None:
    source = read(tmp_path, MIXED, "--check-rows", check_rows)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template rejects .* \(--bad-rows skip leaves"):
        source.limit_lengths(no_system)
    source = read(tmp_path, MIXED, "--check-rows", check_rows, "--bad-rows", "skip")
    source.limit_lengths(no_system)
    assert [prompt.label for _, prompt in source.next_prompts(3)] == ["user"] * 3
    assert source.skipped_rows() == {"bad": 2, "long": 0}
    with pytest.raises(ValueError, match=r"--apply-chat-template: no template$"):  # no row would be better
        read(tmp_path, MIXED, "--bad-rows", "skip").limit_lengths(no_template)


def test_held_out_prompts_that_the_template_rejects_are_bad_rows(tmp_path: Path) -> None:
    prompts = [prompt for _, prompt in read(tmp_path, MIXED, "--no-shuffle").next_prompts(3)]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*--bad-rows skip"):
        check_prompt_lengths(prompts, no_system, 10, "error", "error")
    assert [p.label for p in check_prompt_lengths(prompts, no_system, 10, "error", "skip")] == ["user"]
