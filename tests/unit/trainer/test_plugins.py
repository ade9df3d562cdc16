"""--model-conversion-path and --model-provider-path that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_models import make_checkpoint
from benchmarks.trainer_cases import make_config, only_worker
from slime_rl.trainer.plugins import load_conversion


class HasNoModel:
    def __init__(self, config: Any, hf_path: str) -> None: ...

    def load_weights(self, models: list[Any], hf_path: str) -> None: ...

    def export_weights(self, models: list[Any]) -> Any: ...

    def kept_weights(self, hf_path: str) -> Any: ...


class Raises(HasNoModel):
    def __init__(self, config: Any, hf_path: str) -> None:
        raise KeyError("hidden")


class TakesNothing(HasNoModel):
    def __init__(self) -> None: ...


def gives_nothing(config: Any, transformer_config: Any, pre_process: bool, post_process: bool) -> None: ...


def raises(config: Any, transformer_config: Any, pre_process: bool, post_process: bool) -> None:
    raise KeyError("hidden")


def test_conversion_that_is_made_otherwise_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"TakesNothing' takes \(\).*, but it is made as \(config, hf_path\)"):
        load_conversion(f"{__name__}:TakesNothing")


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--model-conversion-path", "HasNoModel", "must have the attribute `architecture`"),
        ("--model-conversion-path", "Raises", r"raised KeyError: 'hidden' at .*test_plugins\.py:\d+"),
        ("--model-provider-path", "gives_nothing", "must return Megatron's GPTModel, got NoneType"),
        ("--model-provider-path", "raises", r"raised KeyError: 'hidden' at .*test_plugins\.py:\d+"),
    ],
)
def test_what_a_plugin_does_wrong_comes_with_its_flag(flag: str, name: str, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    with pytest.raises(ValueError, match=rf"{flag}.* {message}"):
        only_worker(make_config(tmp_path, flag, f"{__name__}:{name}"))
