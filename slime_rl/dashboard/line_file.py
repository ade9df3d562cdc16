"""A jsonl file that somebody else is writing, read on from where the last look ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LineFile(Generic[T]):
    """What `parse(line, offset)` made of every whole line so far; lines for which it raises ValueError are `broken`.

    A last line without its end is left for the next look. A file that was replaced or cut, as a resume does it, is
    read anew.
    """

    def __init__(self, path: Path, parse: Callable[[bytes, int], T]) -> None:
        self.path, self._parse = path, parse
        self._forget()

    def _forget(self) -> None:
        self.items: list[T] = []
        self.broken: list[int] = []  # line numbers, from 1
        self.generation: tuple[int, int] | None = None  # of the file that was read: another one has another
        self._end = self._number = 0

    def look(self) -> list[T]:
        """Read what is new -> all items; none where there is no such file."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._forget()
            return self.items
        generation = (found.st_dev, found.st_ino)
        if generation != self.generation or found.st_size < self._end:
            self._forget()
            self.generation = generation
        if found.st_size > self._end:
            self._read()
        return self.items

    def _read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._number += 1
                try:
                    self.items.append(self._parse(line, self._end))
                except ValueError:
                    self.broken.append(self._number)
                self._end += len(line)


def read_step_line(line: bytes, _: int) -> dict[str, Any]:
    """The JSON object of a line of metrics.jsonl.

    Raises:
        ValueError: it is not an object with a whole `step`.
    """
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        raise ValueError(f"must be an object with a whole number `step`, got {line[:80]!r}")
    return value
