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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from yaml.constructor import SafeConstructor

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


@dataclass(frozen=True)
class _BadRow:
    """Stands for a row that could not be read, among others that could."""

    problem: str


class LoadedRows:
    """Rows that were read at once."""

    def __init__(self, path: str, rows: list[Any], lines: list[int] | None = None) -> None:
        self.path, self.rows, self.lines = path, rows, lines

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> dict[str, Any]:
        value = self.rows[row]
        if isinstance(value, _BadRow):
            raise ValueError(value.problem)
        return as_row(value)

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}" if self.lines else f"{self.path}: element {row}"


class ColumnarRows:
    """parquet or arrow, through pyarrow. The last few blocks stay in memory."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa  # only where such files are read

        self.path = path
        try:
            self._blocks = _open_parquet(path) if path.endswith(".parquet") else _open_arrow(path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        self._damaged: dict[int, str] = {}  # blocks that cannot be read: not tried again for each of their rows
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
        loaded, first = self._load(block), row - self._starts[block]
        # Converting rows one by one is slow; reading in order, as the check at the start does, converts many at once.
        in_order, self._last = row == self._last + 1, row
        if in_order:
            try:
                self._ahead, self._ahead_from = loaded.slice(first, _READ_AHEAD).to_pylist(), row
                return self._ahead[0]
            except Exception:  # of which row, and whether of this one, is seen below
                self._ahead = []
        try:
            return loaded.slice(first, 1).to_pylist()[0]
        except Exception as error:  # pyarrow has many, by the type that a column claims to be
            raise ValueError(f"cannot be read: {type(error).__name__}: {error}") from error

    def _load(self, block: int) -> Any:
        """Raises ValueError for a damaged block."""
        import pyarrow as pa

        if block not in self._damaged:
            try:
                return self._blocks.load(block)
            except (pa.ArrowException, OSError) as error:
                self._damaged[block] = " ".join(str(error).split())
        rows = f"rows {self._starts[block]} to {self._starts[block + 1] - 1}"
        raise ValueError(f"{rows} cannot be read: {self._damaged[block]}")

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
    _check_columns(path, file.schema_arrow.names)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    return _Blocks(sizes, file.read_row_group)


def _open_arrow(path: str) -> _Blocks:
    import pyarrow as pa

    try:
        table = pa.ipc.open_stream(pa.memory_map(path)).read_all()  # mapped, not copied
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(pa.memory_map(path)).read_all()
    _check_columns(path, table.schema.names)
    batches = table.to_batches()
    return _Blocks([batch.num_rows for batch in batches], batches.__getitem__)


def _check_columns(path: str, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: several columns are named {', '.join(map(repr, twice))}")


def _first_character(path: str) -> str:
    with open(path, encoding="utf-8-sig") as file:
        for line in file:
            if stripped := line.strip():
                return stripped[0]
    return ""


def _read_json(path: str) -> tuple[list[Any]]:
    try:
        return (json.loads(Path(path).read_text(encoding="utf-8-sig")),)
    except ValueError as error:  # not JSON, not UTF-8, or a number of too many digits
        raise ValueError(f"{path}: not valid JSON: {error}") from error


def _read_yaml(path: str) -> tuple[list[Any], list[int]]:
    """A row that is valid YAML but no value, as the date 2024-13-45, is a bad row; the others are read."""
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(node, yaml.SequenceNode):
        kind = {yaml.MappingNode: "dict", yaml.ScalarNode: "text"}.get(type(node), "nothing")
        raise ValueError(f"{path}: must hold a list of rows, got {kind}")
    rows: list[Any] = []
    for item in node.value:
        try:
            rows.append(SafeConstructor().construct_document(item))
        except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
            rows.append(_BadRow(f"not valid YAML: {' '.join(str(error).split())}"))
    return rows, [item.start_mark.line + 1 for item in node.value]


def _read_csv(path: str) -> tuple[list[Any], list[int]]:
    """Rows with the line that each begins on; blank lines are passed over."""
    rows: list[Any] = []
    lines: list[int] = []
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than csv's 128 KiB
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        texts: list[str] = []  # the lines of the newest row
        reader = csv.reader(_kept_in(texts, file))
        names: list[str] | None = None
        newest: list[str] = []
        line = 1
        for fields in reader:
            begins, line = line, reader.line_num + 1
            newest, texts[:] = texts[:], []
            if not fields or (names is not None and len(names) > 1 and len(fields) == 1 and not fields[0].strip()):
                continue
            foreign = _foreign_byte(fields)
            if names is None:
                if foreign is not None:
                    raise ValueError(f"{path}:{begins}: the header is not UTF-8: it has the byte {foreign:#x}")
                names = fields
                _check_columns(path, names)
                continue
            if foreign is not None:
                rows.append(_BadRow(f"not UTF-8: it has the byte {foreign:#x}"))
            elif len(fields) != len(names):
                rows.append(_BadRow(f"this line does not have the header's {len(names)} columns, but {len(fields)}"))
            else:
                rows.append(dict(zip(names, fields, strict=True)))
            lines.append(begins)
        if rows and _is_open(newest):  # csv takes the rest of the file for one field
            rows[-1] = _BadRow("a quotation mark opens a field that does not end before the file does")
    return rows, lines


def _kept_in(texts: list[str], file: Iterable[str]) -> Iterator[str]:
    for text in file:
        texts.append(text)
        yield text


def _is_open(texts: list[str]) -> bool:
    """Whether a row ends within quotation marks."""
    try:
        list(csv.reader(texts, strict=True))
    except csv.Error as error:
        return "unexpected end of data" in str(error)
    return False


def _foreign_byte(fields: list[str]) -> int | None:
    """The first byte that is no UTF-8 in text that was read with surrogateescape."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        return ord(error.object[error.start]) & 0xFF
    return None
