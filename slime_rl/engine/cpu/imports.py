"""Keeps SGLang from importing what a run does not use; on two cores that halves an engine's start."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path


def keep_out_unused(model_path: str) -> None:
    """Before sglang is imported: only the wanted model's module is loaded, and megatron is as if it were missing.

    SGLang imports all of its 250 model files to look one up, and megatron (seconds) for a debugging aid.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    skipped = unneeded_models(model_path)
    if skipped:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(skipped))


def unneeded_models(model_path: str) -> list[str]:
    """Names of SGLang's model modules other than those that define the checkpoint's architecture.

    Empty, so that SGLang loads them all, when the architecture is not found: it knows more ways to find one.
    """
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return []  # SGLang itself will say what is wrong with the folder
    architectures = json.loads(config.read_text()).get("architectures") or []
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return []
    files = sorted(Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py"))
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files}
    wanted = {name for name, text in texts.items() if any(f"class {a}(" in text for a in architectures)}
    return [name for name in texts if name not in wanted] if wanted else []
