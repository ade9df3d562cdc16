"""Where groups with tokens are kept: fresh ones as objects, then packed in blocks, then in files over the byte budget.

    put ──► fresh objects ──many──► packed block ──over --buffer-memory-bytes, or offload──► segment file
                  └──────────────────────┴──────────────── get ◄─────────────────────────────────┘ (mapped)

Every group is in one place. A block or file goes when its last group does.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from slime_rl.buffer.keepable import check_and_weigh
from slime_rl.buffer.packed import PackedGroups
from slime_rl.types import Group

_SEGMENT = re.compile(r"segment_\d{6,}\.safetensors(\.partial)?")
log = logging.getLogger(__name__)

# Packing is cheap in bulk and dear one by one; a synchronous step mostly fits in here and is never packed at all.
FRESH_GROUPS = 256
FRESH_BYTES = 256 << 20


@dataclass
class _Block:
    packed: PackedGroups | None  # None while in a file
    path: Path | None
    rows: dict[int, int]  # group_index -> row, of the groups still here
    nbytes: int

    def load(self) -> PackedGroups:
        if self.packed is not None:
            return self.packed
        assert self.path is not None
        try:
            return PackedGroups.load(self.path)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise self._unreadable(error) from error

    def unpack(self, group_indices: Sequence[int]) -> list[Group]:
        packed = self.load()
        try:
            return packed.unpack([self.rows[i] for i in group_indices])
        except Exception as error:  # other bytes than were written fail anywhere
            if self.path is None:
                raise
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ValueError:
        assert self.path is not None
        return ValueError(
            f"--buffer-spill-dir {self.path.parent}: {len(self.rows)} groups that were spilled to {self.path.name} "
            f"cannot be read: {type(error).__name__}: {error}. Nothing may remove or change the files of a run that "
            "goes on; the newest checkpoint has its own copy of all groups: continue with --load"
        )


class PayloadStore:
    """Groups by group_index within `budget_bytes` of host memory (None: no bound), the rest in files in `folder`."""

    def __init__(self, budget_bytes: int | None, folder: Path) -> None:
        self.budget_bytes, self.folder = budget_bytes, folder
        self._fresh: dict[int, tuple[Group, int]] = {}
        self._fresh_bytes, self._packed_bytes, self._spilled_bytes = 0, 0, 0
        self._block_of: dict[int, _Block] = {}
        self._blocks: dict[int, _Block] = {}  # by id, in order of age
        self._lock: IO[str] | None = None
        self._num_segments = 0

    def __contains__(self, group_index: int) -> bool:
        return group_index in self._fresh or group_index in self._block_of

    def __len__(self) -> int:
        return len(self._fresh) + len(self._block_of)

    @property
    def memory_bytes(self) -> int:
        """Host memory of the payloads; estimated for fresh ones."""
        return self._fresh_bytes + self._packed_bytes

    @property
    def spilled_bytes(self) -> int:
        return self._spilled_bytes

    def put(self, group: Group, nbytes: int | None = None) -> None:
        """Keep `group`, in place of what was kept under its index. `nbytes` is what `check_and_weigh` says of it.

        Raises:
            ValueError: the group cannot be kept, and nothing is changed; or memory is over the budget and the folder
                cannot take more, and everything put so far is still here.
        """
        nbytes = check_and_weigh(group) if nbytes is None else nbytes
        self.remove(group.group_index)
        self._fresh[group.group_index] = (group, nbytes)
        self._fresh_bytes += nbytes
        if len(self._fresh) > FRESH_GROUPS or self._fresh_bytes > FRESH_BYTES:
            self._pack_fresh()
        if self.budget_bytes is not None and self.memory_bytes > self.budget_bytes:
            self._pack_fresh()
            if self.memory_bytes > self.budget_bytes:
                self._spill(self.budget_bytes // 2)  # to half, so that files hold many groups

    def get_many(self, group_indices: Sequence[int]) -> list[Group]:
        """The groups of these indices, in their order; files are read, and groups stay where they are."""
        found: dict[int, Group] = {}
        of_block: dict[int, list[int]] = {}
        for group_index in group_indices:
            if group_index in self._fresh:
                found[group_index] = self._fresh[group_index][0]
            else:
                of_block.setdefault(id(self._block_of[group_index]), []).append(group_index)
        for block_id, indices in of_block.items():
            block = self._blocks[block_id]
            for group in block.unpack(indices):
                found[group.group_index] = group
        return [found[group_index] for group_index in group_indices]

    def remove(self, group_index: int) -> None:
        """Let go of a group; one that is not here is no error."""
        if group_index in self._fresh:
            self._fresh_bytes -= self._fresh.pop(group_index)[1]
        elif group_index in self._block_of:
            block = self._block_of.pop(group_index)
            del block.rows[group_index]
            if not block.rows:
                self._discard(block)

    def offload(self) -> None:
        """Move everything into files."""
        self._pack_fresh()
        self._spill(0)

    def onload(self) -> None:
        """Read everything back into memory, as far as the budget goes."""
        for block in list(self._blocks.values()):
            fits = self.budget_bytes is None or self.memory_bytes + block.nbytes <= self.budget_bytes
            if block.path is not None and fits:
                packed = block.load().select(list(block.rows.values())).clone()  # off the mapping, into memory
                self._discard(block)
                self._add_block(packed)

    def packed(self) -> list[PackedGroups]:
        """All groups, for a checkpoint, block by block: those in files stay there until they are written."""
        self._pack_fresh()
        return [block.load().select(list(block.rows.values())) for block in self._blocks.values()]

    def load(self, blocks: Sequence[PackedGroups]) -> None:
        """Start from the groups of a checkpoint, which may be mapped from its file."""
        for group_index in [*self._fresh, *self._block_of]:
            self.remove(group_index)
        for packed in blocks:
            if self.budget_bytes is None or self.memory_bytes + packed.nbytes <= self.budget_bytes:
                self._add_block(packed.clone())
            else:
                self._add_block(packed, self._write(packed))

    def _add_block(self, packed: PackedGroups, path: Path | None = None) -> None:
        """Enter a block that is in memory, or in the file `path`."""
        indices = packed.groups["group_index"].tolist()
        rows = {group_index: row for row, group_index in enumerate(indices)}
        block = _Block(packed if path is None else None, path, rows, packed.nbytes)
        self._blocks[id(block)] = block
        self._block_of |= dict.fromkeys(indices, block)
        self._count(block, +1)

    def _discard(self, block: _Block) -> None:
        """Forget a block whose groups are gone or elsewhere, with its file."""
        del self._blocks[id(block)]
        self._count(block, -1)
        if block.path is not None:
            _unlink(block.path)

    def _count(self, block: _Block, sign: int) -> None:
        if block.path is None:
            self._packed_bytes += sign * block.nbytes
        else:
            self._spilled_bytes += sign * block.nbytes

    def _pack_fresh(self) -> None:
        if self._fresh:
            groups = [group for group, _ in self._fresh.values()]
            packed = PackedGroups.pack(groups)
            self._fresh.clear()
            self._fresh_bytes = 0
            self._add_block(packed)

    def _spill(self, target_bytes: int) -> None:
        """Move whole blocks into one new file until memory holds `target_bytes`; the youngest go first."""
        chosen: list[_Block] = []
        left = self.memory_bytes
        for block in reversed(self._blocks.values()):
            if left > target_bytes and block.packed is not None:
                chosen.append(block)
                left -= block.nbytes
        if not chosen:
            return
        chosen.reverse()
        packed = PackedGroups.concat([block.load().select(list(block.rows.values())) for block in chosen])
        path = self._write(packed)
        for block in chosen:
            self._discard(block)
        self._add_block(packed, path)

    def _write(self, packed: PackedGroups) -> Path:
        try:
            path = self._segment_path()
            packed.save(path)
        except OSError as error:
            raise ValueError(
                f"--buffer-spill-dir {self.folder}: cannot write {packed.nbytes} bytes{_free(self.folder)}: {error}. "
                "No group in memory is lost; make room, give a folder that can be written to, or raise "
                "--buffer-memory-bytes"
            ) from error
        return path

    def _segment_path(self) -> Path:
        if self._lock is None:
            self._lock = _claim(self.folder)
        elif not _is_at(self._lock, self.folder / "lock"):  # maybe another run's by now
            raise FileNotFoundError("the folder was removed or replaced while the run goes on")
        self._num_segments += 1
        return self.folder / f"segment_{self._num_segments:06d}.safetensors"

    def close(self) -> None:
        """Remove the files and give the folder free."""
        for block in self._blocks.values():
            if block.path is not None:
                _unlink(block.path)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _claim(folder: Path) -> IO[str]:
    """Take a spill folder for this process and clear what a killed run left there: a checkpoint holds its own copy.

    Raises:
        ValueError: another running process has the folder.
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "a")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ValueError(f"--buffer-spill-dir {folder}: another run uses this folder; give each its own") from error
    for left_over in folder.iterdir():
        if _SEGMENT.fullmatch(left_over.name) and left_over.is_file():  # nothing of anybody else's
            left_over.unlink()
    return lock


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether `path` still is the open `file`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unlink(path: Path) -> None:
    """Remove a file that holds nothing of use; one that cannot be removed is cleared when the folder is used again."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("--buffer-spill-dir: cannot remove %s: %s", path, error)


def _free(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free} free)"
    except OSError:
        return ""
