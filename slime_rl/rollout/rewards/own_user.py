"""A user of its own for each program, where the run is root: then the kernel keeps it from all other processes.

No account is needed: a number that nobody has, different for every process that starts programs.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_FIRST, _SPAN = 0x40000000, 1 << 22  # process ids are below 2 ** 22
_FEW_FIRST, _FEW_SPAN = 20_000, 40_000  # in a user namespace of 65,536 numbers
_CAP_CHOWN, _CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID = 0, 2, 6, 7
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAPABILITY_VERSION = 0x20080522


def number_for(paths: Iterable[Path]) -> int | None:
    """The user that a program of this process may run as and still read `paths` (interpreter, packages, folder); None
    where there is none: the run is not root, or has not the capabilities for it."""
    if os.geteuid() != 0 or not all(map(_have, (_CAP_CHOWN, _CAP_SETGID, _CAP_SETUID))):
        return None
    if not _have(_CAP_DAC_READ_SEARCH) and not all(map(_open_to_all, paths)):
        return None
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()[:1])
    if mapped > _FIRST + _SPAN:
        return _FIRST + os.getpid() % _SPAN
    return _FEW_FIRST + os.getpid() % _FEW_SPAN if mapped >= _FEW_FIRST + _FEW_SPAN else None


def become(number: int, paths: Iterable[Path]) -> None:
    """Be that user, without groups and capabilities; the right to read any file is kept where `paths` need it (an
    interpreter in /root)."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep = not all(map(_open_to_all, paths))
    libc.prctl(_PR_SET_KEEPCAPS, int(keep), 0, 0, 0)
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    if keep:
        bits = 1 << _CAP_DAC_READ_SEARCH
        header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
        if libc.capset(header, struct.pack("6I", bits, bits, bits, 0, 0, 0)) != 0:
            raise OSError(ctypes.get_errno(), "capset failed")
        if libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_CAP_AMBIENT_RAISE) failed")


def _have(capability: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    return bool(int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16) >> capability & 1)


def _open_to_all(path: Path) -> bool:
    """Anybody may read it and reach it, by the name it has and by the one that it stands for."""
    names = {path, path.resolve()}
    return all(name.stat().st_mode & 0o004 for name in names) and all(
        folder.stat().st_mode & 0o001 for name in names for folder in name.parents
    )
