"""When an engine on CPU needs help with latent attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_rl.engine.cpu.latent_attention import is_needed


@pytest.mark.parametrize(
    ("fields", "expected"), [({"kv_lora_rank": 20}, True), ({"kv_lora_rank": None}, False), ({}, False)]
)
def test_only_models_that_keep_a_latent_need_it(tmp_path: Path, fields: dict[str, int | None], expected: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert is_needed(str(tmp_path)) is expected
    assert not is_needed(str(tmp_path / "none"))
