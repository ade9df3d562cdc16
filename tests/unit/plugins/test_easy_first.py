from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import make_config

from plugins.curricula.easy_first import easy_first, growing_over
from slime_rl.buffer.policies import CURRICULA
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config


def config_for(tmp_path: Path, difficulties: list[float | None]) -> Config:
    path = tmp_path / "graded.jsonl"
    rows = [{"prompt": "p", "label": "1", "metadata": {"difficulty": d} if d is not None else {}} for d in difficulties]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_config(
        tmp_path, "--prompt-data", str(path), "--curriculum-path", "plugins.curricula.easy_first:easy_first"
    )


def test_it_loads_as_a_plugin() -> None:
    assert CURRICULA.load("plugins.curricula.easy_first:easy_first") is easy_first


def test_epochs_begin_with_the_easiest_rows_and_end_with_all(tmp_path: Path) -> None:
    source = FilePromptSource(config_for(tmp_path, [5, 1, 9, 2, 7, 3]))
    drawn = [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(2 + 4 + 6 + 6)]
    rows_of = [[row for epoch, row in drawn if epoch == n] for n in range(4)]
    assert [sorted(rows) for rows in rows_of] == [[1, 3], [0, 1, 3, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert rows_of[2] != rows_of[3]  # shuffled anew


def test_a_resumed_run_goes_on_in_the_same_order(tmp_path: Path) -> None:
    config = config_for(tmp_path, [5, 1, 9, 2, 7, 3])
    whole = [(epoch, prompt.source_index) for epoch, prompt in FilePromptSource(config).next_prompts(15)]
    for at in (1, 2, 4, 11):
        source = FilePromptSource(config)
        source.next_prompts(at)
        again = FilePromptSource(config)
        again.load_state_dict(source.state_dict())
        assert [(epoch, prompt.source_index) for epoch, prompt in again.next_prompts(15 - at)] == whole[at:]


def test_a_row_without_its_difficulty_and_a_bad_setting_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 1: metadata\['difficulty'\] must be a number, got None"):
        FilePromptSource(config_for(tmp_path, [1, None]))
    with pytest.raises(ValueError, match="number of epochs > 0, got 0"):
        growing_over(0)
