"""`--config FILE`: flags from a YAML file, turned into arguments so that they pass the same checks as typed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from slime_rl.config.checks import check_file
from slime_rl.config.flags import flag_name


class _StrictLoader(yaml.SafeLoader):
    """YAML whose mappings may not give a key twice; plain YAML silently keeps the last one."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = flag_name(str(loader.construct_object(key_node)).removeprefix("--"))
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ValueError(f"line {line}: {key_node.value} is there twice, first in line {seen[key]}")
        seen[key] = line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: str) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: not YAML, or a mapping in it has a key twice, also if `-` is `_` the second time.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error


def expand_config_files(argv: list[str], check_words: Callable[[list[str]], object] | None = None) -> list[str]:
    """Put the arguments of every `--config FILE` (or `--config=FILE`) in front, so that the command line wins.

    `check_words` is called with the words of each key, so that what is wrong with them can be told with file and key.

    Raises:
        ValueError: no file given, file missing, not YAML, a key given twice, not a mapping of flags to values, or
            what `check_words` raises, with `FILE: KEY` in front.
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
        from_files += _arguments(path, check_words)
    return from_files + rest


def _arguments(path: str, check_words: Callable[[list[str]], object] | None) -> list[str]:
    check_file("--config", path)
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must be a mapping of flag names to values, got {type(content).__name__}")
    arguments: list[str] = []
    for key, value in content.items():
        words = _words(path, str(key), value)
        if check_words is not None:
            try:
                check_words(words)
            except ValueError as error:
                raise ValueError(f"--config {path}: {key}: {error}") from error
        arguments += words
    return arguments


def _words(path: str, key: str, value: Any) -> list[str]:
    name = flag_name(key.removeprefix("--"))
    if name == "--config":
        raise ValueError(f"--config {path}: a configuration file cannot name another one, got {key}: {value!r}")
    if value is None or isinstance(value, dict):
        raise ValueError(f"--config {path}: {key} must have a value (leave the key out for its default), got {value!r}")
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, *(str(item) for item in (value if isinstance(value, list) else [value]))]
