"""The rows of a data spec under one numbering, each read as a checked prompt when it is asked for.

--prompt-data ──► files ──► rows (read on demand) ──► prompts, checked, with file:line
"""

from __future__ import annotations

import logging
from bisect import bisect_right

import numpy as np

from slime_rl.buffer.sources.prompts import SKIP_HINT, LocatedPrompt, prompt_from_row
from slime_rl.buffer.sources.rows import RowFile, open_rows
from slime_rl.buffer.sources.spec import DataFile, parse_data_spec
from slime_rl.config import DataConfig
from slime_rl.types import Prompt

log = logging.getLogger(__name__)

# Where every row that is checked at the start is bad or too long, and skipped, this many more are looked at for one
# that can be used: a wrong key is told after seconds, not after a pass over a whole corpus.
MOST_FURTHER = 100_000


class PromptTable:
    """All rows of a data spec under one numbering: file after file, slices applied. Rows are read when asked for."""

    def __init__(self, spec: str, data: DataConfig, flag: str = "--prompt-data", first_rows: int | None = None) -> None:
        """With `first_rows`, files may be opened for that many rows only."""
        self.data, self.flag = data, flag
        self.files: list[DataFile] = parse_data_spec(spec, flag)
        self._rows: list[RowFile] = [open_rows(file.path, _rows_needed(file, first_rows)) for file in self.files]
        self._ranges = [
            range(len(rows))[file.start : file.stop] for file, rows in zip(self.files, self._rows, strict=True)
        ]
        self.sizes = [len(rows) for rows in self._ranges]
        self._firsts = [0, *np.cumsum(self.sizes).tolist()]
        if len(self) == 0:
            looked = (f"{file} (of {len(rows)} rows)" for file, rows in zip(self.files, self._rows, strict=True))
            raise ValueError(f"{flag}: no rows in {', '.join(looked)}")
        self._check_parts()

    def __len__(self) -> int:
        return self._firsts[-1]

    def _check_parts(self) -> None:
        """Raise ValueError where a slice leaves no row of what it is a slice of: a mixture would silently lack it."""
        sizes: dict[str, int] = {}
        for file, size in zip(self.files, self.sizes, strict=True):
            sizes[file.part] = sizes.get(file.part, 0) + size
        for file, rows, size in zip(self.files, self._rows, self.sizes, strict=True):
            if size == 0 and len(rows) > 0 and sizes[file.part] == 0:
                raise ValueError(f"{self.flag}: {file} has no rows: the file has {len(rows)}")
            if size == 0:
                log.warning("%s: %s has no rows", self.flag, file)

    def get(self, source_index: int) -> LocatedPrompt:
        """One prompt. Raises ValueError naming file:line when its row is bad."""
        if not 0 <= source_index < len(self):
            raise ValueError(f"{self.flag}: there is no row {source_index} of {len(self)}")
        number = bisect_right(self._firsts, source_index) - 1
        row = self._ranges[number][source_index - self._firsts[number]]
        file = self._rows[number]
        try:
            content = file.read(row)
        except ValueError as error:
            raise ValueError(f"{file.where(row)}: {error}") from error
        return prompt_from_row(content, source_index, file.where(row), self.data)

    def good_rows(self, limit: int | None = None) -> list[int]:
        """Numbers of those among the first `limit` rows that can be read; where none can, the first good row behind.

        Raises:
            ValueError: a bad row with --bad-rows error; with skip, no good one, nor one among MOST_FURTHER rows behind.
        """
        good: list[int] = []
        first_error, checked = "", 0
        limit = len(self) if limit is None else limit
        for index in range(min(limit + MOST_FURTHER, len(self))):
            if index >= limit and good:
                break
            checked += 1
            try:
                self.get(index)
            except ValueError as error:
                if self.data.bad_rows == "error":
                    raise ValueError(f"{error} ({SKIP_HINT})") from error
                first_error = first_error or str(error)
            else:
                good.append(index)
        if not good:
            raise ValueError(f"{self.flag}: {_every_one_of(checked, len(self))} is bad; the first: {first_error}")
        if skipped := checked - len(good):
            log.warning("%s: left out %d bad rows of %d; the first: %s", self.flag, skipped, checked, first_error)
        return good


def _every_one_of(checked: int, rows: int) -> str:
    return f"every one of {rows} rows" if checked == rows else f"every one of the first {checked} rows of {rows}"


def _rows_needed(file: DataFile, first_rows: int | None) -> int | None:
    """Rows from the start of a file that hold the first ones of its slice; None for all: it counts from the end."""
    if first_rows is None or (file.start or 0) < 0 or (file.stop is not None and file.stop < 0):
        return None
    return (file.start or 0) + first_rows


def read_prompts(
    path: str, data_config: DataConfig, flag: str = "--eval-prompt-data", limit: int | None = None
) -> list[Prompt]:
    """All prompts that a data spec names (of its first `limit` rows, or the first good one behind where all of them are
    bad and skipped), in file order, each once whatever its weight.

    Raises:
        ValueError: nothing there, a bad row (file:line), or every row bad.
    """
    further = MOST_FURTHER if data_config.bad_rows == "skip" else 0
    table = PromptTable(path, data_config, flag, first_rows=None if limit is None else limit + further)
    return [table.get(index) for index in table.good_rows(limit)]


def check_first_rows(path: str, data_config: DataConfig, flag: str, limit: int) -> None:
    """Find a wrong key or format within the first `limit` rows, without reading the rest.

    Raises:
        ValueError: a bad row with --bad-rows error; names file:line.
    """
    if data_config.bad_rows == "error":
        table = PromptTable(path, data_config, flag, first_rows=limit)
        for index in range(min(limit, len(table))):
            try:
                table.get(index)
            except ValueError as error:
                raise ValueError(f"{error} ({SKIP_HINT})") from error
