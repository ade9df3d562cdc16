"""A folder that appears whole or not at all: written aside, flushed to disk and renamed.

    DIR/.NAME.xxxxxxxx.partial/  lock (held by who writes)   new/ ──► DIR/NAME   old/ ◄── what was DIR/NAME before

A process that is killed leaves this folder; the next one that writes DIR/NAME removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".partial"
_PARTS = frozenset(("lock", "new", "old"))


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """An empty folder in which to write what becomes `path`, beside it; gone at the end of the block.

    What processes that are dead left of the same `path` is removed first; others that are writing it keep theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    outer, lock = _locked_folder(path)
    try:
        new = outer / "new"
        new.mkdir()
        yield new
    finally:
        os.close(lock)  # first: a network file system keeps the name of a file that is open
        shutil.rmtree(outer, ignore_errors=True)


def replace_folder(aside: Path, path: Path) -> None:
    """Flush the files of `aside`, which is of `folder_aside(path)`, to disk and let it take the place of `path`."""
    for file in (path for path in aside.rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    old = aside.with_name("old")
    try:
        if os.path.lexists(path):
            os.replace(path, old)
        os.replace(aside, path)
    finally:
        _put_back(old, path)


def _put_back(old: Path, path: Path) -> None:
    """What was moved away for a folder that did not come."""
    if os.path.lexists(old) and not os.path.lexists(path):
        os.replace(old, path)


def _locked_folder(path: Path) -> tuple[Path, int]:
    while True:
        outer = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent))
        try:
            return outer, _lock(outer, wait=True)
        except FileNotFoundError:  # taken for a leftover, in the moment before it was locked
            continue
        except BaseException:  # a full disk takes no file, a signal ends it
            shutil.rmtree(outer, ignore_errors=True)
            raise


def _remove_leftovers(path: Path) -> None:
    ours = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")
    for left in [entry for entry in path.parent.iterdir() if ours.fullmatch(entry.name)]:
        try:
            if left.is_symlink() or not _PARTS.issuperset(os.listdir(left)):
                continue  # somebody else's, by chance of that name
            lock = _lock(left, wait=False)
        except OSError:  # it is being written, it is gone, or it is not ours to remove
            continue
        try:
            _put_back(left / "old", path)
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)
        with suppress(OSError):  # where an open file keeps its name, the folder is still there
            left.rmdir()


def _lock(outer: Path, *, wait: bool) -> int:
    """Of a file: network file systems know these locks on other machines too. The kernel drops it with the process.

    Raises:
        OSError: another has it (BlockingIOError), or removed the folder (FileNotFoundError).
    """
    lock = os.open(outer / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _flock(lock, wait)
        if not os.path.samestat(os.fstat(lock), os.stat(outer / "lock")):
            raise FileNotFoundError(outer / "lock")
    except BaseException:
        os.close(lock)
        raise
    return lock


def _flock(lock: int, wait: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if not wait:
            raise  # a file system without locks: nobody can tell what is left over, and nothing is removed
