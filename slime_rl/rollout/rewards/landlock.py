"""Landlock: which files a process and all it starts may touch, and that it may signal only what it started.

It needs no privilege, but a kernel that has it (5.13 for files, 6.12 for signals); memory and descriptors of processes
outside (`/proc/PID/mem`, ptrace) are out of reach from the first version on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # system calls, the same on every machine
_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
# Rights on files that a version can keep: 13, then moving between folders (2), truncating (3), device commands (5).
_HANDLED = ((1, 0x1FFF), (2, 0x3FFF), (3, 0x7FFF), (5, 0xFFFF))
_SCOPES_VERSION, _SCOPE_SOCKETS, _SCOPE_SIGNALS = 6, 1, 2


def version() -> int:
    """Of the kernel's Landlock; 0 where there is none."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION))


def keeps_signals() -> bool:
    """Whether a restricted process can signal only what it started."""
    return version() >= _SCOPES_VERSION


def keep_signals() -> None:
    """Signals, memory and descriptors only of what this process starts, any file. Does nothing on older kernels."""
    if keeps_signals():
        with _ruleset(0, _SCOPE_SIGNALS):
            pass


def restrict(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Keep this process to these files and folders (with all below them; those that are not there are passed over).

    Does nothing where the kernel has no Landlock. Raises OSError where it has one that refuses.
    """
    abi = version()
    if abi == 0:
        return
    handled = max(rights for since, rights in _HANDLED if since <= abi)
    with _ruleset(handled, _SCOPE_SOCKETS | _SCOPE_SIGNALS if keeps_signals() else 0) as ruleset:
        for paths, rights in ((readable, _READ), (writable, handled)):
            for path in paths:
                _allow(ruleset, path, rights & handled)


@contextlib.contextmanager
def _ruleset(handled: int, scopes: int) -> Iterator[int]:
    """A new set of rules, in force from the end of the block on."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = 24 if scopes else 8  # older kernels know the first field only
    ruleset = libc.syscall(_CREATE, struct.pack("QQQ", handled, 0, scopes), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset failed")
    try:
        yield ruleset
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(_RESTRICT, ruleset, 0) != 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        rights &= -1 if path.is_dir() else _OF_FILES
        if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule failed for {path}")
    finally:
        os.close(fd)
