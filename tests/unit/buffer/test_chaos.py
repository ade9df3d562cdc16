"""The chaos benchmark on a small scale, and that it would notice what it looks for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import chaos_buffer
from benchmarks.chaos_buffer import MODES, config_for, faults, finish, saved_trained


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_buffer, "NUM_STEPS", 12)


def test_killed_runs_train_every_prompt_once_in_every_mode(tmp_path: Path) -> None:
    rng = random.Random(5)
    for number, (name, mode) in enumerate(MODES.items()):
        config = config_for(tmp_path / str(number), mode)
        folder, _ = finish(config, rng, most_kills=2)
        assert faults(config, folder, None) == (0, 0), name


def test_lost_and_repeated_prompts_are_noticed(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", MODES["synchronous"])
    folder, kills = finish(config, None, 0)
    trained = saved_trained(folder)
    assert kills.total() == 0 and len(trained) == 48
    assert faults(config, folder, trained) == (0, 0)
    path = folder / "model" / "trained.json"
    path.write_text(json.dumps([*trained[:-1], trained[0]]))
    assert faults(config, folder, None) == (1, 1)
    step, group_index, epoch, row = trained[5]
    path.write_text(json.dumps([*trained[:5], (step, group_index, epoch, row + 1), *trained[6:]]))
    lost, _ = faults(config, folder, None)
    assert lost >= 1
