from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.rollout.extra_metrics import LOG_FUNCTIONS, extra_metrics
from slime_rl.types import Sample


def test_numbers_come_back_as_metrics(tmp_path: Path) -> None:
    samples = [Sample(index=0, group_index=0, rollout_id=0, prompt="p")]
    result = extra_metrics(lambda config, step, s: {"mine/count": len(s) + step}, make_config(tmp_path), 3, samples)
    assert result == {"mine/count": 4.0}


@pytest.mark.parametrize("value", [None, {"a": "text"}, {1: 2.0}])
def test_anything_else_names_the_flag(tmp_path: Path, value: Any) -> None:
    config = make_config(tmp_path, "--log-function-path", "my:fn")
    with pytest.raises(ValueError, match=r"--log-function-path my:fn must return a dictionary of names and numbers"):
        extra_metrics(lambda config, step, s: value, config, 0, [])


def test_what_it_raises_names_the_flag(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--log-function-path", "my:fn")
    with pytest.raises(ValueError, match=r"--log-function-path my:fn raised ZeroDivisionError: .*, for step 4"):
        extra_metrics(lambda config, step, s: {"a": 1 / step * 0 + 1 / 0}, config, 4, [])


def test_wrong_signature_is_found_when_loaded() -> None:
    with pytest.raises(ValueError, match=r"called as \(config, step, samples\)"):
        LOG_FUNCTIONS.load("test_extra_metrics:one_argument")


def one_argument(config: Any) -> dict[str, float]:
    return {}
