"""What runs of a tool inside the fence."""

from __future__ import annotations

import importlib
import json
from typing import Any


def call(function: str, arguments: dict[str, Any]) -> str:
    """The answer of `package.module:function` as text; text stays as it is, other values become JSON."""
    module, _, name = function.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    value = target(**arguments)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
