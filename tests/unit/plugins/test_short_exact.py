from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from factories import make_config

from plugins.rewards.short_exact import reward
from slime_rl.rollout.rewards import REWARDS
from slime_rl.types import Sample


def sample_of(response: str, length: int, label: str | None = "7") -> Sample:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="p", label=label, response=response)
    sample.append_tokens([5] * length, log_probs=[-1.0] * length, versions=[0] * length)
    return sample


def test_short_right_answers_earn_most_and_wrong_ones_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--max-response-len", "100")
    group = [sample_of("7", 0), sample_of("the answer is 7.", 50), sample_of("7", 150), sample_of("8", 0)]
    values = asyncio.run(reward(config, group))
    assert [value["score"] for value in values] == [1.0, 0.75, 0.5, 0.0]
    assert [value["correct"] for value in values] == [1.0, 1.0, 1.0, 0.0]


def test_it_loads_as_a_plugin_and_needs_labels(tmp_path: Path) -> None:
    assert REWARDS.load("plugins.rewards.short_exact:reward") is reward
    with pytest.raises(ValueError, match="short_exact needs a label"):
        asyncio.run(reward(make_config(tmp_path), [sample_of("7", 1, label=None)]))
