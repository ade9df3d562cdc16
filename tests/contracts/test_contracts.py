"""Flags and plugin signatures change only on purpose, and the generated pages follow them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
UPDATE = "if the change is meant: python tests/contracts/snapshots.py, and say it in CHANGELOG.md"


def load_snapshots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_snapshots", FOLDER / "snapshots.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file_name", ["plugin_signatures.json", "flags.json"])
def test_snapshot_is_up_to_date(file_name: str) -> None:
    snapshots = load_snapshots()
    now = json.loads(snapshots.as_json(snapshots.SNAPSHOTS[file_name]()))
    kept = json.loads((FOLDER / file_name).read_text(encoding="utf-8"))
    changed = {key: (kept.get(key), now.get(key)) for key in {**kept, **now} if kept.get(key) != now.get(key)}
    assert changed == {}, UPDATE


def test_every_extension_point_of_the_plan_has_a_protocol() -> None:
    signatures = load_snapshots().plugin_signatures()
    assert {
        "DataBuffer",
        "BufferFilter",
        "PromptSource",
        "RolloutFunction",
        "GenerateFunction",
        "RewardFunction",
        "GroupFilter",
        "LogFunction",
        "AdvantageFunction",
        "PolicyLossFunction",
        "ModelProvider",
        "ModelConversion",
    } <= set(signatures)
    assert all(signatures.values()), "a protocol without methods checks nothing"


def test_a_reward_plugin_is_called_with_config_and_a_whole_group() -> None:
    call = load_snapshots().plugin_signatures()["RewardFunction"]["__call__"]
    assert call.startswith("async (self, config: Config, group: list[Sample])")


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
