"""One base Config per session; tests vary its algorithm section."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from factories import make_config

from slime_rl.config import Config


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_config(tmp_path_factory.mktemp("algorithms"), "--max-response-len", "10")


@pytest.fixture
def algo(base_config: Config) -> Callable[..., Config]:
    """`algo(policy_loss="gspo", eps_clip=0.1)`: a Config with these fields of AlgorithmConfig changed."""

    def make(**fields: Any) -> Config:
        model = base_config.model
        if fields.get("policy_loss") == "distillation":  # refused without a teacher
            model = dataclasses.replace(model, teacher_load=model.hf_checkpoint)
        algorithm = dataclasses.replace(base_config.algorithm, **fields)
        return dataclasses.replace(base_config, model=model, algorithm=algorithm)

    return make
