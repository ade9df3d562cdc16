"""Prompts from files, epoch after epoch.

--prompt-data ──► files ──► rows (read on demand) ──► order of the epoch ──► prompts
                                                       seed, epoch           checked, with file:line
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime_rl.buffer.sources.fingerprint import describe, fingerprint
from slime_rl.buffer.sources.order import epoch_order
from slime_rl.buffer.sources.prompts import LocatedPrompt, check_prompt_lengths, prompt_from_row
from slime_rl.buffer.sources.rows import RowFile, open_rows
from slime_rl.buffer.sources.spec import DataFile, parse_data_spec
from slime_rl.config import Config, DataConfig
from slime_rl.types import Prompt

log = logging.getLogger(__name__)

SKIP_HINT = "--bad-rows skip leaves such rows out"


class PromptTable:
    """All rows of a data spec under one numbering: file after file, slices applied. Rows are read when asked for."""

    def __init__(self, spec: str, data: DataConfig, flag: str = "--prompt-data") -> None:
        self.data, self.flag = data, flag
        self.files: list[DataFile] = parse_data_spec(spec, flag)
        self._rows: list[RowFile] = [open_rows(file.path) for file in self.files]
        self._ranges = [
            range(len(rows))[file.start : file.stop] for file, rows in zip(self.files, self._rows, strict=True)
        ]
        self.sizes = [len(rows) for rows in self._ranges]
        self._firsts = [0, *np.cumsum(self.sizes).tolist()]
        if len(self) == 0:
            looked = (f"{file} (of {len(rows)} rows)" for file, rows in zip(self.files, self._rows, strict=True))
            raise ValueError(f"{flag}: no rows in {', '.join(looked)}")

    def __len__(self) -> int:
        return self._firsts[-1]

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

    def good_rows(self) -> list[int]:
        """Numbers of all rows that can be read.

        Raises:
            ValueError: a bad row with --bad-rows error, or no good one with skip.
        """
        good: list[int] = []
        first_error = ""
        for index in range(len(self)):
            try:
                self.get(index)
            except ValueError as error:
                if self.data.bad_rows == "error":
                    raise ValueError(f"{error} ({SKIP_HINT})") from error
                first_error = first_error or str(error)
            else:
                good.append(index)
        if not good:
            raise ValueError(f"{self.flag}: every one of {len(self)} rows is bad; the first: {first_error}")
        if skipped := len(self) - len(good):
            log.warning("%s: left out %d bad rows of %d; the first: %s", self.flag, skipped, len(self), first_error)
        return good


def read_prompts(
    path: str, data_config: DataConfig, flag: str = "--eval-prompt-data", limit: int | None = None
) -> list[Prompt]:
    """All prompts that a data spec names, in file order, each once whatever its weight.

    Raises:
        ValueError: nothing there, a bad row (file:line), or every row bad.
    """
    table = PromptTable(path, data_config, flag)
    return [table.get(index) for index in table.good_rows()[:limit]]


def check_first_rows(path: str, data_config: DataConfig, flag: str, limit: int) -> None:
    """Find a wrong key or format within the first `limit` rows, without reading the rest.

    Raises:
        ValueError: a bad row with --bad-rows error; names file:line.
    """
    if data_config.bad_rows == "error":
        table = PromptTable(path, data_config, flag)
        for index in range(min(limit, len(table))):
            try:
                table.get(index)
            except ValueError as error:
                raise ValueError(f"{error} ({SKIP_HINT})") from error


class FilePromptSource:
    """`--data-source-path file`: the PromptSource over --prompt-data.

    The order is a function of seed and epoch alone; the state is a cursor and what it points into. A row that cannot
    be used (bad with --bad-rows skip, too long with --long-prompt skip) is passed over in every epoch.
    """

    def __init__(self, config: Config) -> None:
        if config.data.prompt_data is None:
            raise ValueError("--prompt-data is needed with --data-source-path file")
        self.config = config
        self.table = PromptTable(config.data.prompt_data, config.data)
        self.fingerprint = fingerprint(self.table.files)
        self._usable = np.zeros(len(self.table), dtype=bool)
        self._usable[self.table.good_rows()] = True
        self.num_bad = int((~self._usable).sum())
        self.num_long = 0
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def limit_lengths(self, encode: Callable[[Prompt], Sequence[int]]) -> None:
        """Apply --max-prompt-len and --long-prompt with `encode`, the rendering that generation uses.

        Call it before prompts are drawn. Raises ValueError naming file:line and the length.
        """
        if (self._epoch, self._position) != (0, 0):
            raise ValueError("limit_lengths must be called before prompts are drawn")
        limit, policy = self.config.sampling.max_prompt_len, self.config.data.long_prompt
        usable = [self.table.get(int(index)) for index in self._usable.nonzero()[0]]
        kept = [prompt.source_index for prompt in check_prompt_lengths(usable, encode, limit, policy)]
        self.num_long = len(usable) - len(kept)
        if self.num_long:
            log.warning("--prompt-data: left out %d prompts over --max-prompt-len %d", self.num_long, limit)
        self._usable[:] = False
        self._usable[kept] = True
        self._order = self._order_of(0)

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """The next prompts as (epoch, prompt), going on to the next epoch when one ends."""
        drawn: list[tuple[int, Prompt]] = []
        while len(drawn) < num_prompts:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
                if len(self._order) == 0:
                    continue  # a weight far below 1 may choose only rows that are passed over; another epoch will not
            drawn.append((self._epoch, self.get(int(self._order[self._position]))))
            self._position += 1
        return drawn

    def get(self, source_index: int) -> Prompt:
        return self.table.get(source_index)

    def __len__(self) -> int:
        return len(self._order)

    def _order_of(self, epoch: int) -> np.ndarray:
        weights = [file.weight for file in self.table.files]
        seed, shuffle = self.config.train.seed, self.config.data.shuffle
        order = epoch_order(self.table.sizes, weights, seed, epoch, shuffle)
        return order[self._usable[order]]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the cursor and what it points into."""
        return {"epoch": self._epoch, "position": self._position, "dataset": self.fingerprint, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor.

        Raises:
            ValueError: the state belongs to another dataset or another order; names both.
        """
        if state["dataset"] != self.fingerprint:
            raise ValueError(
                f"--load: the checkpoint was trained on {describe(state['dataset'])}, but --prompt-data is "
                f"{describe(self.fingerprint)}; resume with the same data, or start without --load"
            )
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"--load: the checkpoint's data order has {name} {state[name]!r}, this run has {value!r}; rows "
                    "would be trained twice or never"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.config.train.seed, "shuffle": self.config.data.shuffle, "usable": int(self._usable.sum())}
