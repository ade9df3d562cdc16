from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config

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
