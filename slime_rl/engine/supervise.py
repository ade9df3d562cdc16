"""A small program that runs a command and guarantees that nothing of it survives its owner. Standard library, Linux.

    owner ──pipe──► supervise.py ──fork──► command ──► whatever it starts
                    │ pipe closed or parent gone (also kill -9): end everything
                    │ "stop SECONDS" on the pipe, or SIGTERM: ask the command, then end everything
                    └ command ended: end what it left, pass on its exit code (128 + signal when a signal ended it)

The supervisor is a child subreaper, so processes that lose their parent, or start a session of their own, stay below
it and are found. The kernel kills the command when the supervisor itself is killed.

Usage: python supervise.py CONTROL_FD OWNER_PID SCRATCH_DIR SHM_PREFIX COMMAND [ARG ...]
At the end SCRATCH_DIR is removed ("" for none), and of shared memory: the files /dev/shm/SHM_PREFIX* that the command
mapped or that are new and nobody's ("" for none), and what torch and SGLang call by the pid of a process below us.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OWNER_CHECK_S = 0.5  # the pipe alone does not tell when a fork of the owner still holds its other end
OWNER_GONE_GRACE_S = 0.5  # enough for a server to unlink its files; nobody waits for its results any more
SIGNALLED_GRACE_S = 5.0
MAP_LIMIT_S = 5.0  # from the making of a shared file to its mapping
UNMAPPED_AGE_S = 1.0  # after which a file that nobody has mapped is nobody's
KILL_LIMIT_S = 10.0  # a process in uninterruptible sleep cannot be waited for without a bound
SGLANG_SHM_PREFIX = "sglang_loads_"  # of an engine: SGLang leaves this file in /dev/shm, however it ends
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Starts the command on construction; `run` waits for its end, or brings it about."""

    def __init__(self, command: list[str], control_fd: int, owner_pid: int, shm_prefix: str) -> None:
        self.control_fd, self.owner_pid = control_fd, owner_pid
        self.shm_prefix = shm_prefix
        self.shm_files: set[str] = set()  # mapped by a process below us
        self.foreign: set[str] = set()  # files with the prefix that nobody below us maps
        self.killed: set[int] = set()
        self.ended: dict[int, int] = {}  # exit status of every reaped process, by pid
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_inheritable(control_fd, False)
        self.wake_fd = wake_on_signals()
        self.child = os.fork()
        if self.child == 0:
            become(command, libc)

    def run(self) -> int:
        """Exit status of the command (negative: the signal that ended it) once nothing of it is left."""
        grace_s = self.watch()
        if grace_s is not None:
            send(self.child, signal.SIGTERM)
            if not self.wait_for_child(grace_s):
                send(self.child, signal.SIGKILL)
                self.wait_for_child(KILL_LIMIT_S)
        self.note_shared_memory()
        self.kill_descendants()
        for path in self.shm_files | self.files_with_our_pids() | self.unmapped_files():
            remove_file(path)
        return self.ended.get(self.child, -signal.SIGKILL)

    def watch(self) -> float | None:
        """Wait for the end: seconds of grace when the command must be stopped, None when it ended by itself."""
        message = b""
        while True:
            readable, _, _ = select.select([self.control_fd, self.wake_fd], [], [], OWNER_CHECK_S)
            stopped = self.wake_fd in readable and set(os.read(self.wake_fd, 4096)) & set(STOP_SIGNALS)
            self.reap()
            self.note_shared_memory()  # while it runs: after a crash there is nobody left to ask
            if self.child in self.ended:
                return None
            if stopped:
                return SIGNALLED_GRACE_S
            if self.control_fd in readable:
                received = os.read(self.control_fd, 4096)
                message += received
                if b"\n" in message:
                    return float(message.split()[1])
                if not received:
                    return OWNER_GONE_GRACE_S
            if os.getppid() != self.owner_pid:
                return OWNER_GONE_GRACE_S

    def note_shared_memory(self) -> None:
        """Remember the new shared-memory files of our prefix that a process below us has mapped."""
        new = shared_memory_files(self.shm_prefix) - self.shm_files - self.foreign
        if not new:
            return
        for pid in descendants(os.getpid()):
            self.shm_files.update(new.intersection(mapped_files(pid)))
        self.foreign |= {path for path in new - self.shm_files if age_s(path) > MAP_LIMIT_S}

    def unmapped_files(self) -> set[str]:
        """New files of our prefix that nobody has mapped: a server that fails while it starts leaves one."""
        new = shared_memory_files(self.shm_prefix) - self.shm_files - self.foreign
        if new:  # one that another server has just made is mapped in a moment
            time.sleep(max(0.0, UNMAPPED_AGE_S - min(map(age_s, new))))
        mapped = {path for pid in processes() for path in mapped_files(pid)} if new else set()
        return new - mapped

    def files_with_our_pids(self) -> set[str]:
        """Files that processes below us made: torch_PID_RANDOM_COUNTER of tensors, sgl_shm_KIND_PID_RANDOM of queues
        between ranks of SGLang."""
        pids = self.killed | set(self.ended)
        queues = {path for path in shared_memory_files("sgl_shm_") if path.split("_")[-2] in map(str, pids)}
        return queues | shared_memory_files(*(f"torch_{pid}_" for pid in pids))

    def reap(self) -> None:
        """Collect every ended child, orphans that were handed to us included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.ended[pid] = os.waitstatus_to_exitcode(status)

    def wait_for_child(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self.child not in self.ended and time.monotonic() < deadline:
            time.sleep(0.02)
            self.reap()
        return self.child in self.ended

    def kill_descendants(self) -> None:
        """SIGKILL everything below us until nothing is left; the next round meets what a dying process forked."""
        deadline = time.monotonic() + KILL_LIMIT_S
        while time.monotonic() < deadline:
            self.reap()
            left = descendants(os.getpid())
            if not left:
                return
            self.killed.update(left)
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)


def become(command: list[str], libc: ctypes.CDLL) -> NoReturn:
    """Turn the fork into the command, in a process group of its own."""
    supervisor = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)  # the supervisor died before the line above took effect
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error}\n")
        sys.stderr.flush()
        os._exit(127)


def wake_on_signals() -> int:
    """A descriptor that becomes readable when a child ends or a stop signal comes; its bytes are signal numbers."""
    read_fd, write_fd = os.pipe()
    for fd in (read_fd, write_fd):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_fd)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return read_fd


def processes() -> dict[int, tuple[int, int]]:
    """(parent, session) of every process, from /proc."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended while we looked
            found[int(name)] = (int(fields[1]), int(fields[3]))
    return found


def descendants(root: int) -> list[int]:
    """Every process below `root`."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        found += level
    return found


def mapped_files(pid: int) -> list[str]:
    """Absolute paths of the files that a process has mapped; none when it has ended."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            return [line[line.index("/") :].strip() for line in file if "/" in line]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def shared_memory_files(*prefixes: str) -> set[str]:
    """Paths of the files in shared memory whose names begin with one of these; none for an empty prefix."""
    wanted = tuple(prefix for prefix in prefixes if prefix)
    if not wanted or not os.path.isdir("/dev/shm"):
        return set()
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(wanted)}


def age_s(path: str) -> float:
    """Seconds since a file was made or written; 0 when it is gone."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return  # the command removed it itself


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # ended in the meantime, which is what we want


def main(argv: list[str]) -> int:
    control_fd, owner_pid, scratch, shm_prefix, command = int(argv[0]), int(argv[1]), argv[2], argv[3], argv[4:]
    try:
        status = Supervisor(command, control_fd, owner_pid, shm_prefix).run()
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)  # the owner removes it too: either may come first
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
