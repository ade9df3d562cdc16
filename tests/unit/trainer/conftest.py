from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trainer_cases import make_checkpoint


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 of two layers, to be left as it is."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, num_hidden_layers=2)
    return path
