"""Numbers of the system calls that filters name, for each machine on which programs can be kept from them."""

from __future__ import annotations

import platform
from collections.abc import Mapping

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as `struct seccomp_data` names them

_NEWER = {  # the same everywhere
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "process_mrelease": 448,
}
_X86_64 = (
    "ioctl 16, shmget 29, socket 41, clone 56, kill 62, semget 64, msgget 68, fcntl 72, ptrace 101, "
    "rt_sigqueueinfo 129, setpriority 141, sched_setparam 142, sched_setscheduler 144, pivot_root 155, chroot 161, "
    "mount 165, umount2 166, tkill 200, sched_setaffinity 203, tgkill 234, mq_open 240, add_key 248, request_key 249, "
    "keyctl 250, ioprio_set 251, migrate_pages 256, unshare 272, move_pages 279, rt_tgsigqueueinfo 297, "
    "perf_event_open 298, prlimit64 302, open_by_handle_at 304, setns 308, process_vm_readv 310, "
    "process_vm_writev 311, kcmp 312, sched_setattr 314, bpf 321, userfaultfd 323"
)
_AARCH64 = (
    "fcntl 25, ioctl 29, ioprio_set 30, umount2 39, mount 40, pivot_root 41, chroot 51, unshare 97, ptrace 117, "
    "sched_setparam 118, sched_setscheduler 119, sched_setaffinity 122, kill 129, tkill 130, tgkill 131, "
    "rt_sigqueueinfo 138, setpriority 140, mq_open 180, msgget 186, semget 190, shmget 194, socket 198, add_key 217, "
    "request_key 218, keyctl 219, clone 220, migrate_pages 238, move_pages 239, rt_tgsigqueueinfo 240, "
    "perf_event_open 241, prlimit64 261, open_by_handle_at 265, setns 268, process_vm_readv 270, "
    "process_vm_writev 271, kcmp 272, sched_setattr 274, bpf 280, userfaultfd 282"
)


def _parsed(text: str) -> dict[str, int]:
    pairs = (entry.split() for entry in text.split(", "))
    return {name: int(number) for name, number in pairs} | _NEWER


NUMBERS: Mapping[str, dict[str, int]] = {"x86_64": _parsed(_X86_64), "aarch64": _parsed(_AARCH64)}


def numbers() -> dict[str, int]:
    """The table of this machine. Raises OSError where there is none."""
    name = platform.machine()
    if name not in NUMBERS:
        raise OSError(f"no table of system calls for {name!r}: programs cannot be kept from any here")
    return NUMBERS[name]
