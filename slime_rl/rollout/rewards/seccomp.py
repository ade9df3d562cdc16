"""Filters of system calls for processes that run code of others: they need no privilege and cannot be taken off again.

BPF programs over `struct seccomp_data`: the number of the call, the machine, the arguments.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls."""

    arch: int
    socket: int
    ptrace: int
    process_vm_writev: int
    kill: int
    tkill: int
    tgkill: int
    pidfd_send_signal: int = 424
    io_uring_setup: int = 425
    pidfd_open: int = 434


_MACHINES = {
    "x86_64": _Machine(0xC000003E, socket=41, ptrace=101, process_vm_writev=311, kill=62, tkill=200, tgkill=234),
    "aarch64": _Machine(0xC00000B7, socket=198, ptrace=117, process_vm_writev=271, kill=129, tkill=130, tgkill=131),
}
_AF_UNIX = 1
_X32 = 0x40000000
_EPERM = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _GIVE = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def deny_network_and_signals() -> None:
    """Refuse sockets other than AF_UNIX, ptrace, process_vm_writev, every signal to another process and io_uring (which
    could open sockets on its own). Raises OSError where that cannot be had."""
    machine = _machine()
    always = (machine.ptrace, machine.process_vm_writev, machine.kill, machine.tkill, machine.tgkill)
    lines = _beginning(machine)
    for call in (*always, machine.pidfd_send_signal, machine.io_uring_setup):
        lines += [_op(_EQUAL, call, 0, 1), _refuse()]
    lines += [_op(_EQUAL, machine.socket, 1, 0), _op(_GIVE, _ALLOW)]
    lines += [_op(_LOAD, _FIRST_ARGUMENT), _op(_EQUAL, _AF_UNIX, 1, 0), _refuse(), _op(_GIVE, _ALLOW)]
    _install(lines)


def deny_signals_to(pids: Sequence[int]) -> None:
    """Refuse kill, tgkill, pidfd_open and ptrace-free ways to signal `pids`: processes, negative ones groups, -1 all
    that the user has. Raises OSError where that cannot be had."""
    machine = _machine()
    calls = (machine.kill, machine.tkill, machine.tgkill, machine.pidfd_open)
    lines = _beginning(machine)
    for index, call in enumerate(calls):
        lines.append(_op(_EQUAL, call, len(calls) - index, 0))  # to the look at the argument
    lines += [_op(_GIVE, _ALLOW), _op(_LOAD, _FIRST_ARGUMENT)]
    for pid in pids:
        lines += [_op(_EQUAL, pid & 0xFFFFFFFF, 0, 1), _refuse()]
    _install([*lines, _op(_GIVE, _ALLOW)])


def _machine() -> _Machine:
    name = platform.machine()
    if name not in _MACHINES:
        raise OSError(f"no table of system calls for {name!r}: programs cannot be kept from any here")
    return _MACHINES[name]


def _beginning(machine: _Machine) -> list[bytes]:
    """Refuse what is meant for another machine; then the call's number is loaded."""
    lines = [_op(_LOAD, _ARCHITECTURE), _op(_EQUAL, machine.arch, 1, 0), _refuse(), _op(_LOAD, _NUMBER)]
    return [*lines, _op(_AT_LEAST, _X32, 0, 1), _refuse()]  # the same calls under other numbers


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refuse() -> bytes:
    return _op(_GIVE, _ERRNO | _EPERM)


def _install(lines: list[bytes]) -> None:
    libc, code = ctypes.CDLL(None, use_errno=True), b"".join(lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")
