"""What others build on, as plain data: plugin signatures and flags. A change shows in the diff of two JSON files.

python tests/contracts/snapshots.py     write both files anew, after a change that is meant
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import typing
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent.parent))

from slime_rl import protocols  # noqa: E402
from slime_rl.config import SECTIONS  # noqa: E402
from slime_rl.config.flags import flag_name  # noqa: E402


def plugin_signatures() -> dict[str, dict[str, str]]:
    """protocol -> method -> signature with annotations, `async` in front where it is awaited."""
    found = {}
    for name, protocol in vars(protocols).items():
        if getattr(protocol, "_is_protocol", False) and protocol.__module__ == protocols.__name__:
            methods = {n: m for n, m in vars(protocol).items() if inspect.isfunction(m) and is_part(n)}
            found[name] = {n: signature_text(m) for n, m in methods.items()}
    return found


def is_part(method_name: str) -> bool:
    return method_name in ("__call__", "__len__") or not method_name.startswith("_")


def signature_text(method: Any) -> str:
    text = str(inspect.signature(method)).replace("'", "")
    return f"async {text}" if inspect.iscoroutinefunction(method) else text


def flags() -> dict[str, dict[str, Any]]:
    """flag -> section, type, default and other spellings."""
    found = {}
    for section, cls in SECTIONS.items():
        for item in dataclasses.fields(cls):
            prefix = item.metadata.get("passthrough")
            found[f"--{prefix}-*" if prefix else flag_name(item.name)] = {
                "section": section,
                "type": str(typing.get_type_hints(cls)[item.name])
                .replace("typing.", "")
                .removeprefix("<class '")
                .rstrip("'>"),
                "default": "REQUIRED" if item.default is dataclasses.MISSING else item.default,
                "aliases": list(item.metadata.get("aliases", ())),
            }
    return found


def as_json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


SNAPSHOTS = {"plugin_signatures.json": plugin_signatures, "flags.json": flags}


if __name__ == "__main__":
    for file_name, make in SNAPSHOTS.items():
        (FOLDER / file_name).write_text(as_json(make()), encoding="utf-8")
        print(f"written: {FOLDER / file_name}")
