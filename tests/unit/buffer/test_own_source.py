from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.buffer.contract_scene import through_disk
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.opening import open_buffer
from slime_rl.config import Config
from slime_rl.protocols import CountsSkippedRows, LengthLimited
from slime_rl.types import Prompt


class Mine:
    """Rows 0, 1, 2, …; each test changes a method of it."""

    def __init__(self, config: Config) -> None:
        self.next = 0

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        self.next += num_prompts
        return [(0, prompt(row)) for row in range(self.next - num_prompts, self.next)]

    def get(self, source_index: int) -> Any:
        return prompt(source_index)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def __len__(self) -> int:
        return 10


class Skipping(Mine):
    def skipped_rows(self) -> dict[str, int]:
        return {"odd": 3}

    def limit_lengths(self, encode: Any) -> None:
        self.encode = encode


class MyBuffer(LedgerBuffer): ...


def prompt(row: int) -> Prompt:
    return Prompt(source_index=row, prompt=f"p{row}", label=None, metadata={})


def opened(tmp_path: Path, name: str = "Mine") -> Any:
    return open_buffer(make_config(tmp_path, "--data-source-path", f"test_own_source:{name}"), lambda prompt: [])


def broken(*arguments: Any) -> Any:
    raise KeyError("oops")


@pytest.mark.parametrize("name", ["__init__", "next_prompts", "state_dict", "load_state_dict", "__len__"])
def test_what_a_source_raises_comes_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    state = opened(tmp_path).state_dict()
    monkeypatch.setattr(Mine, name, broken)
    with pytest.raises(ValueError, match=r"--data-source-path test_own_source:Mine raised KeyError: 'oops' at .*:\d+"):
        buffer = opened(tmp_path)
        buffer.reserve(2)
        buffer.state_dict()
        buffer.load_state_dict(state)
        len(buffer.source)


def test_get_must_return_the_prompt_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, message in (
        (None, r"get\(0\) must return a Prompt, got None"),
        (prompt(7), r"get\(0\) returned the prompt of row 7"),
    ):
        buffer = opened(tmp_path)
        (group,) = buffer.reserve(1)
        buffer.requeue(group)
        monkeypatch.setattr(Mine, "get", lambda self, row, wrong=wrong: wrong)
        with pytest.raises(ValueError, match=rf"--data-source-path test_own_source:Mine: {message}"):
            buffer.reserve(1)


def test_optional_methods_are_there_if_the_source_has_them(tmp_path: Path) -> None:
    assert not isinstance(opened(tmp_path).source, CountsSkippedRows | LengthLimited)
    buffer = opened(tmp_path, "Skipping")
    assert buffer.counts()["skipped_rows/odd"] == 3
    assert isinstance(buffer.source, LengthLimited)


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": None}, "the prompt of row 0 must be text or a list of chat messages, got NoneType None"),
        ({"prompt": []}, "the prompt of row 0 must be text or a list"),
        ({"prompt": ""}, "the prompt of row 0 is empty"),
        ({"prompt": [USER, {**USER, "content": 5}]}, "the prompt of row 0: message 1: 'content' must be text"),
        ({"metadata": None}, "the prompt of row 0 must have a dictionary as its metadata, got None"),
        (
            {"source_index": 1 << 63},
            r"must give source_index as a whole number >= 0 and < 2\*\*63, got 9223372036854775808",
        ),
        ({"source_index": -1}, "must give source_index as a whole number >= 0"),
        ({"epoch": -1}, "must give epoch as a whole number >= 0"),
    ],
)
def test_a_prompt_that_generation_or_a_checkpoint_could_not_take_is_refused_when_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    fields = {"epoch": 0, "source_index": 0, "prompt": "p", "label": None, "metadata": {}, **changed}
    epoch = fields.pop("epoch")
    monkeypatch.setattr(Mine, "next_prompts", lambda self, num_prompts: [(epoch, Prompt(**fields))])
    buffer = opened(tmp_path)
    with pytest.raises(ValueError, match=f"--data-source-path test_own_source:Mine:? {message}"):
        buffer.reserve(1)
    assert buffer.counts()["reserved"] == 0


@pytest.mark.parametrize("wrong", [None, {"bad": "x"}, {3: 1}])
def test_skipped_rows_must_be_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(Skipping, "skipped_rows", lambda self: wrong)
    with pytest.raises(ValueError, match="test_own_source:Skipping: skipped_rows must return whole numbers by reason"):
        opened(tmp_path, "Skipping").counts()


def test_what_a_buffer_of_one_s_own_raises_when_it_is_made_comes_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MyBuffer, "__init__", broken)
    config = make_config(tmp_path, "--buffer-path", "test_own_source:MyBuffer")
    with pytest.raises(ValueError, match=r"--buffer-path test_own_source:MyBuffer raised KeyError: 'oops' at .*:\d+"):
        open_buffer(config, lambda prompt: [])


def test_when_a_prompt_is_refused_none_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = opened(tmp_path)
    assert buffer.reserve(2)[1].samples[0].prompt == "p1"
    monkeypatch.setattr(Mine, "next_prompts", third_is_none)
    with pytest.raises(ValueError, match="test_own_source:Mine: the prompt of row 4"):
        buffer.reserve(3)
    monkeypatch.undo()
    again = opened(tmp_path)
    again.load_state_dict(through_disk(buffer.state_dict()))
    assert [group.samples[0].prompt for group in again.reserve(5)] == [f"p{row}" for row in range(5)]


def third_is_none(source: Mine, num_prompts: int) -> list[tuple[int, Prompt]]:
    source.next += num_prompts
    rows = range(source.next - num_prompts, source.next)
    return [(0, replace(prompt(row), prompt=None if row == 4 else f"p{row}")) for row in rows]  # type: ignore[arg-type]
