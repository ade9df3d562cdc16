"""Filters of system calls for processes that run code of others: they need no privilege and cannot be taken off again.

BPF programs over `struct seccomp_data`: the number of the call, the machine, the arguments (of which the lower halves
are looked at: process ids, commands and flags are 32 bits). A filter is a list of rules, the first that decides counts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Collection, Sequence

from slime_rl.rollout.rewards.syscalls import ARCHITECTURES, numbers

_AF_UNIX = 1
_X32 = 0x40000000
_EPERM, _ENOSYS = 1, 38
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_JMP|JSET|K, BPF_RET|K
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

# Other processes' memory, files and time; kernel facilities that a program has no use for; SysV and POSIX queues and
# memory, which would outlive the program.
# fmt: off
_NEVER = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "migrate_pages",
    "move_pages", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "io_uring_setup", "userfaultfd",
    "perf_event_open", "bpf", "add_key", "request_key", "keyctl", "mount", "umount2", "pivot_root", "chroot",
    "unshare", "setns", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
    "open_by_handle_at", "shmget", "semget", "msgget", "mq_open",
)
# fmt: on
_SIGNAL_OWNERS = (8, 15, 10)  # F_SETOWN, F_SETOWN_EX, F_SETSIG: a signal of choice to a process of choice
_SIGNAL_OWNER_IOCTLS = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP: the same
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_OF_ONE_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


def confine_program(*, signals: bool) -> None:
    """For programs of the sandbox: no network, no other process, nothing that outlives it. See the rules.

    With `signals` it may send them (something else keeps them from others: its user, Landlock); else to itself only.
    Raises OSError where that cannot be had.
    """
    me = os.getpid()
    rules = [_refuse(name) for name in _NEVER]
    rules += [
        _give("clone3", _ENOSYS),  # its flags are out of a filter's sight; the C library takes clone then
        _refuse_bits("clone", 0, _NEW_NAMESPACES),
        _refuse_values("fcntl", 1, _SIGNAL_OWNERS),
        _refuse_values("ioctl", 1, _SIGNAL_OWNER_IOCTLS),
        _allow_only("socket", {0: [_AF_UNIX]}),
        _allow_only("setpriority", {0: [0], 1: [0, me]}),  # PRIO_PROCESS, itself
        _allow_only("ioprio_set", {0: [1], 1: [0, me]}),  # IOPRIO_WHO_PROCESS, itself
        *(_allow_only(name, {0: [0, me]}) for name in _OF_ONE_PROCESS),
    ]
    if not signals:
        rules += [_allow_only("kill", {0: [0, me]}), _allow_only("tgkill", {0: [me]})]  # 0: the group of its own
        rules += [_refuse(name) for name in ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")]
    _install(rules)


def deny_signals_to(pids: Sequence[int]) -> None:
    """For fenced functions: refuse signals, limits and priorities for `pids`: processes, negative ones groups, -1 all
    that the user has; and every way by a descriptor of a process. Raises OSError where that cannot be had."""
    values = [pid & 0xFFFFFFFF for pid in pids]
    groups = [-pid for pid in pids if pid < 0]
    rules = [_refuse(name) for name in ("pidfd_send_signal", "pidfd_getfd", "process_madvise", "process_mrelease")]
    rules += [_refuse(name) for name in ("ptrace", "process_vm_readv", "process_vm_writev")]
    rules += [_refuse_values(name, 0, values) for name in (*_SIGNALS, "pidfd_open", *_OF_ONE_PROCESS)]
    rules += [_refuse_values(name, 1, [*values, *groups]) for name in ("setpriority", "ioprio_set")]
    rules += [
        _refuse_values("fcntl", 1, _SIGNAL_OWNERS[1:]),
        _refuse_values("fcntl", 2, values, {1: _SIGNAL_OWNERS[0]}),
    ]
    rules += [_refuse_values("ioctl", 1, _SIGNAL_OWNER_IOCTLS)]
    _install(rules)


def _refuse(name: str) -> list[bytes]:
    return _give(name, _EPERM)


def _give(name: str, error: int) -> list[bytes]:
    return _for_call(name, [_op(_GIVE, _ERRNO | error)])


def _refuse_bits(name: str, argument: int, bits: int) -> list[bytes]:
    return _for_call(name, [_load(argument), _op(_HAS_BITS, bits, 0, 1), _REFUSE, _OK])


def _refuse_values(
    name: str, argument: int, values: Collection[int], where: dict[int, int] | None = None
) -> list[bytes]:
    """Refuse the call with one of `values` as that argument; with `where` only if other arguments have those values."""
    checks = [op for value in values for op in (_op(_EQUAL, value, 0, 1), _REFUSE)]
    body = [_load(argument), *checks]
    for other, value in (where or {}).items():
        body = [_load(other), _op(_EQUAL, value, 0, len(body)), *body]
    return _for_call(name, [*body, _op(_LOAD, _NUMBER)])  # undecided: the next rule looks at the number again


def _allow_only(name: str, values: dict[int, Collection[int]]) -> list[bytes]:
    """Refuse the call unless each of these arguments has one of its values."""
    body: list[bytes] = []
    for argument, allowed in values.items():
        body.append(_load(argument))
        body += [_op(_EQUAL, value, len(allowed) - index, 0) for index, value in enumerate(allowed)]
        body.append(_REFUSE)
    return _for_call(name, [*body, _OK])


def _for_call(name: str, body: list[bytes]) -> list[bytes]:
    return [_op(_EQUAL, numbers()[name], 0, len(body)), *body]


def _load(argument: int) -> bytes:
    return _op(_LOAD, _ARGUMENTS + 8 * argument)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


_REFUSE, _OK = _op(_GIVE, _ERRNO | _EPERM), _op(_GIVE, _ALLOW)


def _install(rules: list[list[bytes]]) -> None:
    numbers()  # raises OSError on a machine without a table
    lines = [_op(_LOAD, _ARCHITECTURE), _op(_EQUAL, ARCHITECTURES[platform.machine()], 1, 0), _REFUSE]
    lines += [_op(_LOAD, _NUMBER), _op(_AT_LEAST, _X32, 0, 1), _REFUSE]  # the same calls under other numbers
    lines += [op for rule in rules for op in rule]
    lines.append(_OK)
    libc, code = ctypes.CDLL(None, use_errno=True), b"".join(lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")
