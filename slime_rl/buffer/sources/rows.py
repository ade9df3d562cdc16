"""Files of rows, read one row at a time, so that a file may be larger than memory.

jsonl keeps the byte offset of each line, parquet and arrow are mapped and read by block; json, yaml and csv are read
whole.
"""

from __future__ import annotations

import csv
import json
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import yaml

from slime_rl.buffer.sources.json_lines import JsonLines, as_row

_READ_AHEAD = 512
# Row groups that stay in memory: in a shuffled order neighbouring prompts come from different ones.
_CACHE_BYTES = 512 << 20


class RowFile(Protocol):
    """Rows of one file by number."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]:
        """One row. Raises ValueError without naming the place; `where` does that."""
        ...

    def where(self, row: int) -> str:
        """The place of a row as `file:line`."""
        ...


def open_rows(path: str, limit: int | None = None) -> RowFile:
    """The reader for a file, by the end of its name. With `limit`, only that many rows may be there.

    Raises:
        ValueError: the file is not what its name says; names the file.
    """
    try:
        return _open(path, Path(path).suffix, limit)
    except (OSError, UnicodeDecodeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _open(path: str, suffix: str, limit: int | None) -> RowFile:
    if suffix == ".jsonl":
        return JsonLines(path, limit)
    if suffix == ".json":
        return JsonLines(path, limit) if _first_character(path) != "[" else LoadedRows(path, *_read_json(path))
    if suffix in (".yaml", ".yml"):
        return LoadedRows(path, *_read_yaml(path))
    if suffix == ".csv":
        return LoadedRows(path, *_read_csv(path))
    return ColumnarRows(path)


class LoadedRows:
    """Rows that were read at once."""

    def __init__(self, path: str, rows: list[Any], lines: list[int] | None = None) -> None:
        self.path, self.rows, self.lines = path, rows, lines

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> dict[str, Any]:
        return as_row(self.rows[row])

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
    """Blocks of rows, loaded when needed; as many stay as fit into the byte budget, and at least one."""

    def __init__(self, sizes: list[int], load: Callable[[int], Any], cache_bytes: int = _CACHE_BYTES) -> None:
        self.sizes, self._load, self._cache_bytes = sizes, load, cache_bytes
        self._cached: OrderedDict[int, Any] = OrderedDict()
        self._nbytes = 0

    def load(self, number: int) -> Any:
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        block = self._load(number)
        self._nbytes += block.nbytes
        while self._cached and self._nbytes > self._cache_bytes:
            self._nbytes -= self._cached.popitem(last=False)[1].nbytes
        self._cached[number] = block
        return block


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


def _read_yaml(path: str) -> tuple[list[Any], list[int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        rows, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(rows, list) or not isinstance(node, yaml.SequenceNode):
        raise ValueError(f"{path}: must hold a list of rows, got {type(rows).__name__}")
    return rows, [item.start_mark.line + 1 for item in node.value]


def _read_csv(path: str) -> tuple[list[Any], list[int]]:
    rows, lines = [], []
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than csv's 128 KiB
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise ValueError(f"{path}:{reader.line_num}: this line does not have the header's {count} columns")
            rows.append(row)
            lines.append(reader.line_num)
    return rows, lines
