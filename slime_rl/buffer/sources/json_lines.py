"""jsonl files larger than memory: where each line begins is kept, lines are read and parsed when they are asked for."""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import Any

import numpy as np

_CHUNK = 16 << 20
_NEWLINE = 10
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(b" \t\n\r\v\f")] = True


class JsonLines:
    """One JSON object a line; blank lines are passed over. 8 bytes of memory for each row."""

    def __init__(self, path: str, limit: int | None = None) -> None:
        """With `limit`, the rest of the file behind that many rows is not looked at."""
        self.path = path
        self._offsets, self._blanks = index_lines(path, limit)
        self._file = open(path, "rb")  # noqa: SIM115 - kept open for reads by offset

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, row: int) -> dict[str, Any]:
        self._file.seek(int(self._offsets[row]))
        try:
            value = json.loads(self._file.readline().decode("utf-8-sig").rstrip())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        return as_row(value)

    def where(self, row: int) -> str:
        return f"{self.path}:{row + 1 + bisect_right(self._blanks, row)}"


def as_row(value: Any) -> dict[str, Any]:
    """Raises ValueError unless `value` is an object with named fields."""
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object with named fields, got {type(value).__name__}")
    return value


def index_lines(path: str, limit: int | None = None) -> tuple[np.ndarray, list[int]]:
    """(byte offset of each line that is not blank `[N]` int64, for each blank line the rows before it)."""
    found: list[np.ndarray] = []
    blanks: list[int] = []
    num_rows = base = 0
    at_start = True  # whether the next chunk begins with a new line
    with open(path, "rb") as file, open(path, "rb") as again:
        while (limit is None or num_rows < limit) and (chunk := file.read(_CHUNK)):
            data = np.frombuffer(chunk, dtype=np.uint8)
            starts = np.flatnonzero(data == _NEWLINE) + 1
            ends_here = len(starts) > 0 and starts[-1] == len(data)
            starts = starts[:-1] if ends_here else starts
            if at_start:
                starts = np.concatenate([[0], starts])
            is_blank = np.zeros(len(starts), dtype=bool)
            for i in np.flatnonzero(_IS_SPACE[data[starts]]):  # few lines begin with a space, and are looked at
                again.seek(base + int(starts[i]))
                is_blank[i] = again.readline().isspace()
            blanks += (np.flatnonzero(is_blank) - np.arange(is_blank.sum()) + num_rows).tolist()
            rows = starts[~is_blank] + base
            found.append(rows)
            num_rows += len(rows)
            at_start, base = ends_here, base + len(data)
    offsets = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return offsets[:limit], blanks
