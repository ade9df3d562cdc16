"""Removes what a program left behind, however deep, renamed or locked it is."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir, mkdtemp

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PUBLIC = ("/dev/shm", "/tmp", "/var/tmp")  # where any user may write


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder; at the end it is emptied, wherever it was moved meanwhile, and removed."""
    folder = Path(mkdtemp(prefix=prefix))
    fd = os.open(folder, _OPEN_FOLDER)
    try:
        yield folder
    finally:
        _remove(folder, fd)


def remove_scratch_folders(prefix: str) -> None:
    """Remove what `scratch_folder` made with this prefix in a process that was killed."""
    for folder in Path(gettempdir()).glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # no folder of ours
            _remove(folder, os.open(folder, _OPEN_FOLDER))


def _remove(folder: Path, fd: int) -> None:
    empty(fd)
    os.close(fd)
    with contextlib.suppress(OSError):  # moved away: what is empty does no harm
        folder.rmdir()


def empty(fd: int) -> None:
    """Remove all in an open folder. No recursion and no long names: nested folders are moved up to the first level."""
    os.fchmod(fd, 0o700)
    while names := os.listdir(fd):
        changes = 0
        for name in names:
            if _unlink(name, fd):
                changes += 1
                continue
            inner = _opened(name, fd)
            if inner is None:
                continue
            try:
                for child in os.listdir(inner):
                    if not _unlink(child, inner):
                        with contextlib.suppress(OSError):
                            _unlock(child, inner)  # moving a folder writes in it
                            os.rename(child, f".moved-{token_hex(8)}", src_dir_fd=inner, dst_dir_fd=fd)
                            changes += 1
            finally:
                os.close(inner)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=fd)
                changes += 1
        if changes == 0:
            return  # what is left cannot be removed by us


def remove_files_of(user: int) -> None:
    """Remove what this user (of one program, see `own_user`) left in folders that are open to all."""
    for folder in _PUBLIC:
        with contextlib.suppress(OSError):
            fd = os.open(folder, _OPEN_FOLDER)
            try:
                _remove_entries_of(user, fd)
            finally:
                os.close(fd)


def _remove_entries_of(user: int, fd: int) -> None:
    for name in os.listdir(fd):
        with contextlib.suppress(OSError):
            if os.stat(name, dir_fd=fd, follow_symlinks=False).st_uid != user or _unlink(name, fd):
                continue
            inner = _opened(name, fd)
            if inner is not None:
                empty(inner)
                os.close(inner)
                os.rmdir(name, dir_fd=fd)


def _unlink(name: str, fd: int) -> bool:
    """Remove what is no folder."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            return False
        os.unlink(name, dir_fd=fd)
        return True
    except OSError:
        return False


def _opened(name: str, fd: int) -> int | None:
    """A folder in a folder, made ours to change."""
    with contextlib.suppress(OSError):
        _unlock(name, fd)
        return os.open(name, _OPEN_FOLDER, dir_fd=fd)
    return None


def _unlock(folder: str, fd: int) -> None:
    if os.geteuid() != 0:  # root may enter as it is, and must not follow a link that was put there just now
        os.chmod(folder, 0o700, dir_fd=fd)
