"""`--config FILE`: flags from a YAML file, turned into arguments so that they pass the same checks as typed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime_rl.config.checks import check_file
from slime_rl.config.flags import flag_name


def expand_config_files(argv: list[str]) -> list[str]:
    """Put the arguments of every `--config FILE` (or `--config=FILE`) in front, so that the command line wins.

    Raises:
        ValueError: no file given, file missing, not YAML, or not a mapping of flags to values.
    """
    from_files: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--config":
            path = next(words, "")
        elif word.startswith("--config="):
            path = word.partition("=")[2]
        else:
            rest.append(word)
            continue
        if not path:
            raise ValueError("--config needs a file")
        from_files += _arguments(path)
    return from_files + rest


def _arguments(path: str) -> list[str]:
    check_file("--config", path)
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not YAML: {error}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must be a mapping of flag names to values, got {type(content).__name__}")
    return [word for key, value in content.items() for word in _words(path, str(key), value)]


def _words(path: str, key: str, value: Any) -> list[str]:
    name = flag_name(key.removeprefix("--"))
    if name == "--config":
        raise ValueError(f"--config {path}: a configuration file cannot name another one, got {key}: {value!r}")
    if value is None or isinstance(value, dict):
        raise ValueError(f"--config {path}: {key} must have a value (leave the key out for its default), got {value!r}")
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, *(str(item) for item in (value if isinstance(value, list) else [value]))]
