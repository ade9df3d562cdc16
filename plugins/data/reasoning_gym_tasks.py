"""Tasks of the reasoning-gym package, named by one line of text.

    chain_sum?size=500&seed=1&min_terms=2&max_terms=2

The part before `?` is the package's name of the task, the rest are fields of that task's own config class. Values are
JSON where they can be read as such (`3`, `0.5`, `true`, `["+","-"]`), otherwise text. A task is a pure function of this
line and the version of the package.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

# The package draws a random seed where none is given, so that no two runs would see the same prompts.
DEFAULTS: dict[str, Any] = {"size": 500, "seed": 1}
PACKAGE = "reasoning-gym"
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task with all options that differ from the package's defaults."""

    name: str
    options: dict[str, Any]  # always with size and seed

    @property
    def text(self) -> str:
        """The same spec as text, options by name: equal specs have equal texts."""
        options = (f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in sorted(self.options.items()))
        return f"{self.name}?{'&'.join(options)}"


def parse_task_spec(text: str, flag: str = "--prompt-data") -> TaskSpec:
    """Take a spec apart. Whether the task and its options exist is checked by `open_task`.

    Raises:
        ValueError: not of the form NAME?KEY=VALUE&KEY=VALUE, a key given twice, or a size that is no number > 0.
    """
    name, _, rest = text.strip().partition("?")
    options: dict[str, Any] = {}
    for part in rest.split("&") if rest else ():
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise ValueError(f"{flag}: {text!r} must be TASK?KEY=VALUE&KEY=VALUE, got {part!r} in it")
        if key in options:
            raise ValueError(f"{flag}: {text!r} gives {key!r} twice")
        options[key] = _value(value)
    options = {**DEFAULTS, **options}
    for key, least in (("size", 1), ("seed", 0)):
        if type(options[key]) is not int or options[key] < least:
            raise ValueError(f"{flag}: {key} of {text!r} must be a whole number >= {least}, got {options[key]!r}")
    return TaskSpec(name=name, options=options)


def open_task(spec: TaskSpec, flag: str = "--prompt-data") -> Any:
    """The package's dataset (reasoning_gym.ProceduralDataset) of a spec.

    Raises:
        ValueError: the package is missing, it has no such task or option, or it rejects a value.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"{flag} {spec.text}: {error}; pip install {PACKAGE}==0.1.25") from error
    if spec.name not in DATASETS:
        raise ValueError(f"{flag}: {PACKAGE} has no task {spec.name!r}{_suggest(spec.name, list(DATASETS))}")
    known = [field.name for field in dataclasses.fields(DATASETS[spec.name][1])]
    for key in spec.options:
        if key not in known:
            raise ValueError(f"{flag}: {spec.name} has no option {key!r}; it has {', '.join(known)}")
    try:
        return create_dataset(spec.name, **spec.options)
    except (AssertionError, TypeError, ValueError) as error:  # the package checks its options by assert
        raise ValueError(f"{flag} {spec.text}: {PACKAGE} rejects it: {error}") from error


def read_entry(dataset: Any, spec: TaskSpec, index: int) -> dict[str, Any]:
    """One entry (`question`, `answer`, `metadata`) in JSON's types, as it would come back from a file.

    Raises:
        ValueError: the entry cannot be told in JSON, so no file or checkpoint can hold it.
    """
    entry = dataset[index]
    try:
        return json.loads(json.dumps(entry))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec.text}: entry {index} cannot be written as JSON: {error}") from error


def is_number(answer: Any) -> bool:
    """Whether the right answer is a plain number, such as 34 or -3.7."""
    return isinstance(answer, str) and NUMBER.fullmatch(answer) is not None


def package_version() -> str:
    return version(PACKAGE)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
