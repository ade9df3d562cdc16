"""Files of rows, read one row at a time, so that a file may be larger than memory.

jsonl keeps the byte offset of each line, parquet and arrow are mapped and read by block; json and csv are read whole.
"""

from __future__ import annotations

import csv
import json
from array import array
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

_READ_AHEAD = 512


class RowFile(Protocol):
    """Rows of one file by number."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]:
        """One row. Raises ValueError without naming the place; `where` does that."""
        ...

    def where(self, row: int) -> str:
        """The place of a row as `file:line`."""
        ...


def open_rows(path: str) -> RowFile:
    """The reader for a file, by the end of its name.

    Raises:
        ValueError: the file is not what its name says; names the file.
    """
    suffix = Path(path).suffix
    if suffix == ".jsonl":
        return JsonLines(path)
    if suffix == ".json":
        return JsonLines(path) if _first_character(path) != "[" else LoadedRows(path, *_read_json(path))
    if suffix == ".csv":
        return LoadedRows(path, *_read_csv(path))
    return ColumnarRows(path)


class JsonLines:
    """One JSON object a line; blank lines are passed over."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offsets, self.lines = array("q"), array("q")
        with open(path, "rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    self.offsets.append(offset)
                    self.lines.append(number)
                offset += len(line)
        self._file = open(path, "rb")  # noqa: SIM115 - kept open for reads by offset

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, row: int) -> dict[str, Any]:
        self._file.seek(self.offsets[row])
        try:
            value = json.loads(self._file.readline())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        return _as_row(value)

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


class LoadedRows:
    """Rows that were read at once."""

    def __init__(self, path: str, rows: list[Any], lines: list[int] | None = None) -> None:
        self.path, self.rows, self.lines = path, rows, lines

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> dict[str, Any]:
        return _as_row(self.rows[row])

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}" if self.lines else f"{self.path}: element {row}"


class ColumnarRows:
    """parquet or arrow, through pyarrow. The last few blocks stay in memory."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa  # only where such files are read

        self.path = path
        try:
            self._blocks = _open_parquet(path) if path.endswith(".parquet") else _open_arrow(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        self._ahead: list[dict[str, Any]] = []
        self._ahead_from, self._last = 0, -1
        self._starts = [0]
        for rows in self._blocks.sizes:
            self._starts.append(self._starts[-1] + rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, row: int) -> dict[str, Any]:
        ahead = row - self._ahead_from
        if 0 <= ahead < len(self._ahead):
            self._last = row
            return self._ahead[ahead]
        block = bisect_right(self._starts, row) - 1
        # Converting rows one by one is slow; reading in order, as the check at the start does, converts many at once.
        count = _READ_AHEAD if row == self._last + 1 else 1
        rows = self._blocks.load(block).slice(row - self._starts[block], count).to_pylist()
        self._ahead, self._ahead_from, self._last = rows if count > 1 else [], row, row
        return rows[0]

    def where(self, row: int) -> str:
        return f"{self.path}: row {row}"


class _Blocks:
    def __init__(self, sizes: list[int], load: Any) -> None:
        self.sizes = sizes
        self.load = lru_cache(maxsize=16)(load)


def _open_parquet(path: str) -> _Blocks:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    return _Blocks(sizes, file.read_row_group)


def _open_arrow(path: str) -> _Blocks:
    import pyarrow as pa

    try:
        batches = pa.ipc.open_stream(pa.memory_map(path)).read_all().to_batches()  # mapped, not copied
    except pa.ArrowInvalid:
        batches = pa.ipc.open_file(pa.memory_map(path)).read_all().to_batches()
    return _Blocks([batch.num_rows for batch in batches], batches.__getitem__)


def _as_row(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object with named fields, got {type(value).__name__}")
    return value


def _first_character(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if stripped := line.strip():
                return stripped[0]
    return ""


def _read_json(path: str) -> tuple[list[Any]]:
    try:
        return (json.loads(Path(path).read_text(encoding="utf-8")),)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error


def _read_csv(path: str) -> tuple[list[Any], list[int]]:
    rows, lines = [], []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise ValueError(f"{path}:{reader.line_num}: this line does not have the header's {count} columns")
            rows.append(row)
            lines.append(reader.line_num)
    return rows, lines
