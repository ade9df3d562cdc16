"""`--data-source-path file`: prompts from files, epoch after epoch.

PromptTable ──► order of the epoch ──────────► rows that can be used ──► prompts
                seed, epoch, curriculum        bad or long ones are an error, or passed over and counted
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from slime_rl.buffer.policies import CURRICULA
from slime_rl.buffer.ranges import to_ranges
from slime_rl.buffer.sources.fingerprint import describe, fingerprint
from slime_rl.buffer.sources.order import epoch_order, weighted_size
from slime_rl.buffer.sources.prompts import SKIP_HINT, LocatedPrompt, UnrenderedError, prompt_length_problem
from slime_rl.buffer.sources.table import MOST_FURTHER, PromptTable
from slime_rl.config import Config
from slime_rl.registry import own_code
from slime_rl.types import Prompt

log = logging.getLogger(__name__)

_MOST_ROWS = 1 << 31  # of a file in an epoch: 16 GiB of row numbers


class _Row(IntEnum):
    UNSEEN = 0
    GOOD = 1
    BAD = 2
    LONG = 3


class FilePromptSource:
    """The PromptSource over --prompt-data.

    The order is a function of seed and epoch alone; the state is a cursor and what it points into. The first
    --check-rows rows are checked at the start, others when they are drawn. A row that cannot be used (bad with
    --bad-rows skip, too long with --long-prompt skip) is passed over in every epoch, but keeps its place in the order:
    what is known of the rows differs between a run and its resume, and the cursor must mean the same in both. Only a
    curriculum's order depends on it, on what was known when the epoch began, which is part of the state.
    """

    def __init__(self, config: Config) -> None:
        if config.data.prompt_data is None:
            raise ValueError("--prompt-data is needed with --data-source-path file")
        self.config = config
        self.table = PromptTable(config.data.prompt_data, config.data)
        _check_epoch(self.table)
        self.fingerprint = fingerprint(self.table.files)
        self._encode: Callable[[Prompt], Sequence[int]] | None = None
        self._rows = np.zeros(len(self.table), dtype=np.int8)  # of _Row
        path = config.data.curriculum_path
        self.curriculum = CURRICULA.load(path) if path else None
        # A curriculum looks at every row, so that none may be bad without being known.
        limit = None if self.curriculum is not None or config.data.check_rows == 0 else config.data.check_rows
        good = self.table.good_rows(limit)
        self._rows[: len(self.table) if limit is None else max(limit, good[-1] + 1)] = _Row.BAD
        self._rows[good] = _Row.GOOD
        self._num_bad, self._num_long = int((self._rows == _Row.BAD).sum()), 0
        self._not_shown = np.empty(0, dtype=np.int64)  # unusable rows that the epoch's curriculum does not know
        self._begin(0)

    def limit_lengths(self, encode: Callable[[Prompt], Sequence[int]]) -> None:
        """Apply --max-prompt-len and --long-prompt with `encode`, the rendering that generation uses.

        Where all rows that were checked are too long, rows behind are looked at until one can be used. Call it before
        prompts are drawn. Raises ValueError naming file:line and the length.
        """
        if (self._epoch, self._position) != (0, 0):
            raise ValueError("limit_lengths must be called before prompts are drawn")
        self._encode = encode
        good = (self._rows == _Row.GOOD).nonzero()[0]
        problem, num_left_out = "", 0
        for index in good:
            found = self._unusable(self.table.get(int(index)))
            if found is not None:
                problem, num_left_out = found[1], num_left_out + 1
                self._mark(int(index), found[0])
        if num_left_out == len(good):
            problem = self._look_further(problem)
        if num_left_out:
            log.warning("--prompt-data: left out %d prompts; the last: %s", num_left_out, problem)
            self._begin(0)  # a curriculum is not shown them

    def _look_further(self, problem: str) -> str:
        """Judge rows that were not checked until one is good; returns the problem of the last one before it."""
        for row in (self._rows == _Row.UNSEEN).nonzero()[0][:MOST_FURTHER]:
            found = self._judge(int(row))
            if not isinstance(found, str):
                return problem
            problem = found
        seen = int((self._rows != _Row.UNSEEN).sum())
        rows = "" if seen == len(self.table) else f" among the first {seen} rows of {len(self.table)}"
        raise ValueError(f"--long-prompt or --bad-rows skip leaves no prompt at all{rows}; the last one: {problem}")

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """The next prompts as (epoch, prompt), going on to the next epoch when one ends.

        Raises:
            ValueError: a row that cannot be used, where that is an error, or no other row left; none is drawn then, so
                that a checkpoint which is written later still has those before it ahead.
        """
        before = self._epoch, self._position, self._order, self._not_shown
        try:
            return self._draw(num_prompts)
        except BaseException:
            self._epoch, self._position, self._order, self._not_shown = before
            raise

    def _draw(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        drawn: list[tuple[int, Prompt]] = []
        passed = 0  # rows since the last prompt
        while len(drawn) < num_prompts:
            if self._position == len(self._order):
                if passed > 2 * len(self.table):
                    raise ValueError(
                        f"--prompt-data: none of {len(self.table)} rows can be used: {self.skipped_rows()}"
                    )
                self._begin(self._epoch + 1)
                passed += 1  # an epoch may be empty: a weight far below 1, or a curriculum
            prompt = self._read(int(self._order[self._position])) if len(self._order) else None
            self._position += len(self._order) > 0
            passed = 0 if prompt is not None else passed + 1
            if prompt is not None:
                drawn.append((self._epoch, prompt))
        return drawn

    def get(self, source_index: int) -> Prompt:
        return self.table.get(source_index)

    def __len__(self) -> int:
        """Rows of this epoch, without those that are known to be unusable."""
        return int((self._rows[self._order] <= _Row.GOOD).sum())

    def skipped_rows(self) -> dict[str, int]:
        """Rows that are passed over, as far as they have been seen, by reason."""
        return {"bad": self._num_bad, "long": self._num_long}

    def _read(self, row: int) -> Prompt | None:
        """The prompt of a row, or None where it must be passed over."""
        if self._rows[row] > _Row.GOOD:
            return None
        found = self._judge(row)
        if isinstance(found, str):
            kind = "bad row" if self._rows[row] == _Row.BAD else "long prompt"
            log.warning("--prompt-data: left out a %s: %s", kind, found)
            return None
        return found

    def _judge(self, row: int) -> Prompt | str:
        """The prompt of a row, or why it is passed over from now on. Raises ValueError where that is an error."""
        try:
            prompt = self.table.get(row)
        except ValueError as error:
            if self.config.data.bad_rows == "error":
                raise ValueError(f"{error} ({SKIP_HINT})") from error
            self._mark(row, _Row.BAD)
            return str(error)
        if self._rows[row] == _Row.UNSEEN:
            found = self._unusable(prompt)
            self._mark(row, _Row.GOOD if found is None else found[0])
            if found is not None:
                return found[1]
        return prompt

    def _mark(self, row: int, kind: _Row) -> None:
        self._rows[row] = kind
        self._num_bad += kind is _Row.BAD
        self._num_long += kind is _Row.LONG

    def _unusable(self, prompt: LocatedPrompt) -> tuple[_Row, str] | None:
        """Why a prompt cannot be used as it is rendered. Raises ValueError where that is an error."""
        if self._encode is None:
            return None
        policy = self.config.data.long_prompt
        try:
            problem = prompt_length_problem(prompt, self._encode, self.config.sampling.max_prompt_len, policy)
        except UnrenderedError as error:
            if self.config.data.bad_rows == "error":
                raise ValueError(f"{error} ({SKIP_HINT})") from error
            return _Row.BAD, str(error)
        return None if problem is None else (_Row.LONG, problem)

    def _begin(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        not_shown = self._not_shown if self.curriculum is None else (self._rows > _Row.GOOD).nonzero()[0]
        self._order = self._order_of(epoch, not_shown)
        self._epoch, self._position, self._not_shown = epoch, 0, not_shown

    def _order_of(self, epoch: int, not_shown: np.ndarray) -> np.ndarray:
        weights = [file.weight for file in self.table.files]
        seed, shuffle = self.config.train.seed, self.config.data.shuffle
        order = epoch_order(self.table.sizes, weights, seed, epoch, shuffle)
        return order if self.curriculum is None else self._taught(epoch, order[~np.isin(order, not_shown)].tolist())

    def _taught(self, epoch: int, rows: list[int]) -> np.ndarray:
        """The order that the curriculum makes of an epoch's rows."""
        assert self.curriculum is not None
        flag = f"--curriculum-path {self.config.data.curriculum_path}"
        with own_code(flag, f", for epoch {epoch}"):
            chosen = self.curriculum(self.config, epoch, list(rows), self.table.get)
        if not isinstance(chosen, list) or not all(type(row) is int for row in chosen):
            raise ValueError(f"{flag} must return a list of row numbers, got {chosen!r:.80}")
        if foreign := sorted(set(chosen) - set(rows)):
            raise ValueError(f"{flag} returned rows that epoch {epoch} does not have: {foreign[:10]}")
        if not chosen:
            raise ValueError(f"{flag} leaves no row of epoch {epoch}")
        return np.array(chosen, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the cursor and what it points into."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "not_shown": to_ranges(self._not_shown.tolist()),
            "order_hash": None if self.curriculum is None else _hash(self._order),
            "dataset": self.fingerprint,
            "keys": self._keys(),
            **self._settings(),
        }

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
        for flag, key in self._keys().items():
            before = state.get("keys", {}).get(flag, key)
            if before != key:
                log.warning("--load: %s was %r and is %r now: prompts from here on are read from it", flag, before, key)
        epoch, position, ranges = state["epoch"], state["position"], state["not_shown"]
        if type(epoch) is not int or type(position) is not int or epoch < 0:
            raise ValueError(f"--load: the data cursor is at epoch {epoch!r}, row {position!r}, which is no place")
        not_shown = np.array([row for start, stop in ranges for row in range(start, stop)], dtype=np.int64)
        order = self._order_of(epoch, not_shown)
        if self.curriculum is not None and state["order_hash"] != _hash(order):
            raise ValueError(
                f"--load: --curriculum-path {self.config.data.curriculum_path} gives epoch {epoch} another order than "
                "before; rows would be trained twice or never. It must depend on its arguments alone"
            )
        if not 0 <= position <= len(order):
            raise ValueError(f"--load: the data cursor is at row {position} of epoch {epoch}, which has {len(order)}")
        self._epoch, self._position, self._order, self._not_shown = epoch, position, order, not_shown

    def _keys(self) -> dict[str, str | None]:
        data = self.config.data
        return {"--input-key": data.input_key, "--label-key": data.label_field, "--metadata-key": data.metadata_key}

    def _settings(self) -> dict[str, Any]:
        """What the order depends on beyond the data."""
        data = self.config.data
        return {"seed": self.config.train.seed, "shuffle": data.shuffle, "curriculum": data.curriculum_path}


def _hash(order: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(order).data)


def _check_epoch(table: PromptTable) -> None:
    """Raise ValueError for weights by which an epoch, whose order is kept in memory, has no end."""
    for file, size in zip(table.files, table.sizes, strict=True):
        if (rows := weighted_size(size, file.weight)) > _MOST_ROWS:
            raise ValueError(f"--prompt-data: {file} has a weight by which an epoch has {rows:,} rows of it")
