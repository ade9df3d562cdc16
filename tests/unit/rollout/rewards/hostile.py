"""Functions that misbehave, for the fence tests; they run in fenced processes only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import sys
import tempfile
import time
from typing import Any


def add(a: int, b: int) -> int:
    return a + b


def pid() -> list[int]:
    return [os.getpid(), os.getppid()]


def hang(seconds: float = 600.0) -> None:
    time.sleep(seconds)


def spin() -> None:
    while True:
        pass


def deep() -> int:
    return 1 + deep()


def leave(status: int) -> None:
    os._exit(status)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def signal_others(owner: int) -> list[int]:
    """Which of these can be signalled: everybody, the supervisor, its group, its owner; last a child of our own."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
    reached = []
    for pid in (-1, os.getppid(), -os.getpgid(os.getppid()), owner, child):
        try:
            os.kill(pid, 0)
            reached.append(pid)
        except PermissionError:
            continue
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return [pid for pid in reached if pid != child] + [len(reached)]


def open_parent() -> int:
    return os.pidfd_open(os.getppid())


def attack(pid: int) -> list[str]:
    """Ways to harm a process that are not refused; none of them does harm when it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    worked = []

    def sigqueue() -> None:
        if libc.sigqueue(pid, 0, 0):
            raise PermissionError

    def descriptor() -> None:
        signal.pidfd_send_signal(os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY), 0)

    def limits() -> None:
        resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))

    def priority() -> None:
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))

    def owner_of_signals() -> None:
        fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, pid)

    def memory() -> None:
        open(f"/proc/{pid}/mem", "r+b").close()

    for way in (sigqueue, descriptor, limits, priority, owner_of_signals, memory):
        try:
            way()
            worked.append(way.__name__)
        except PermissionError:
            continue
    return worked


def allocate_in_children(count: int, num_bytes: int) -> int:
    for _ in range(count):
        if os.fork() == 0:
            block = b"x" * num_bytes
            time.sleep(1.0 if len(block) < 1 << 26 else 300.0)
            os._exit(0)
    for _ in range(count):
        os.wait()
    return count


def leave_files(then: str) -> int:
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "f"), "w") as file:
        file.write("x")
    if then == "hang":
        time.sleep(600)
    if then == "daemon" and os.fork() == 0:
        time.sleep(600)
    return 1


WARM = []


def warm_up() -> None:
    WARM.append(os.getpid())


def warmed_by_parent() -> bool:
    return os.getppid() in WARM


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def close_files() -> int:
    os.closerange(3, 4096)
    return 1


def print_much(num_bytes: int) -> int:
    block = "x" * (1 << 20)
    for _ in range(num_bytes >> 20):
        sys.stdout.write(block)
        os.write(1, block.encode())
    return num_bytes


def raise_error() -> None:
    raise RuntimeError("the judge fell asleep")


def exit_program() -> None:
    sys.exit(3)


def unserialisable() -> Any:
    return object()


def huge_answer() -> str:
    return "x" * (20 << 20)


def write_garbage() -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, b"\x00\x00\x00\x00\x00\x00\x00\x03[1]")
        except OSError:
            continue
    time.sleep(600)


def forge_answer() -> None:
    """An answer of the right form, from a call that then stays busy."""
    content = b'{"value": 1.0}'
    for fd in range(3, 64):
        try:
            os.write(fd, len(content).to_bytes(8, "big") + content)
        except OSError:
            continue
    time.sleep(600)


def fork_bomb(generations: int = 7) -> None:
    """At most 2 ** 7 processes: an endless one takes the machine down when the fence under test is at fault."""
    for _ in range(min(generations, 7)):
        os.fork()
    time.sleep(300)


def fork_bomb_in_sessions() -> None:
    """The same, each process in a session and group of its own."""
    for _ in range(7):
        if os.fork() == 0:
            os.setsid()
    time.sleep(300)


def leave_daemon(path: str) -> int:
    """Start a process in a session of its own that outlives the call; its id goes to `path`."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.005)
    return 1


def hang_with_a_daemon(path: str) -> None:
    leave_daemon(path)
    hang()
