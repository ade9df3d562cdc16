"""Checks that speak: every failure names the flag, the rule and the value received."""

from __future__ import annotations

import glob
import json
import math
import re
from pathlib import Path
from typing import Any

# One part of a comma-separated data spec: FILE[@[start:stop]][@WEIGHT]; an @ elsewhere belongs to the name.
DATA_PART = re.compile(r"^(?P<path>.+?)(?:@\[(?P<slice>[^\]]*)\])?(?:@(?P<weight>[0-9.eE+-]+))?$")


def check(condition: bool, flag: str, rule: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{flag} {rule}, got {value!r}")


def check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            check(value > 0, "--" + name.replace("_", "-"), "must be > 0", value)
            check(math.isfinite(value), "--" + name.replace("_", "-"), "must be finite", value)


def check_not_negative(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            check(value >= 0, "--" + name.replace("_", "-"), "must be >= 0", value)
            check(math.isfinite(value), "--" + name.replace("_", "-"), "must be finite", value)


def check_dir(flag: str, path: str, must_contain: str) -> None:
    check(Path(path).is_dir(), flag, "must be a folder that exists", path)
    check((Path(path) / must_contain).is_file(), flag, f"must be a folder that contains {must_contain}", path)


def check_model_folder(flag: str, path: str) -> None:
    """Check that `path` holds a config.json with a JSON object, as a Hugging Face folder does."""
    check_dir(flag, path, "config.json")
    file = Path(path) / "config.json"
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {file}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{flag} {file}: must hold a JSON object, got {type(content).__name__}")


def check_file(flag: str, path: str) -> None:
    check(Path(path).is_file(), flag, "must be a file that exists", path)


def read_text(flag: str, path: str | Path) -> str:
    """The text of a file that a flag names.

    Raises:
        ValueError: it cannot be read, or is no text; with the flag and the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: cannot be read as text: {error}") from error


def check_data_files(flag: str, spec: str) -> None:
    """Every part of a comma-separated data spec is there: a file, a folder or a glob that matches something."""
    for part in spec.split(","):
        path = data_path(part)
        check(Path(path).exists() or bool(glob.glob(path, recursive=True)), flag, "must be a file that exists", path)


def data_path(part: str) -> str:
    """The file, folder or glob that a part of a data spec names."""
    match = DATA_PART.match(part.strip())
    return "" if match is None else match["path"]
