"""Nothing of a supervised command survives its end, its owner's or its supervisor's."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import running, wait_for

from slime_rl.engine import supervise
from slime_rl.engine.process import SupervisedProcess

# A command with a child, a grandchild in a session of its own, and an orphan, none of which mind SIGTERM. Each writes
# its pid to the file named by the first argument.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
note()
if os.fork() == 0:
    note()
    if os.fork() == 0:
        os.setsid()
        note()
        if os.fork() == 0:
            note()
        time.sleep(600)
    time.sleep(600)
time.sleep(600)
"""

OWNER = """
import os, sys, time
from pathlib import Path
from slime_rl.engine.process import SupervisedProcess
process = SupervisedProcess([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, Path(sys.argv[3]))
process.start()
if os.fork() == 0:  # a fork that keeps the owner's end of the pipe open
    time.sleep(600)
print(process.supervisor_pid, flush=True)
time.sleep(600)
"""


def pids_of(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def toy(tmp_path: Path, code: str, *arguments: str) -> SupervisedProcess:
    return SupervisedProcess([sys.executable, "-c", code, *arguments], os.environ, tmp_path / "log")


def start_family(tmp_path: Path) -> tuple[SupervisedProcess, list[int]]:
    process, notes = toy(tmp_path, FAMILY, str(tmp_path / "pids")), tmp_path / "pids"
    process.start()
    wait_for(lambda: len(pids_of(notes)) == 4)
    return process, pids_of(notes)


def test_exit_code_and_log_are_passed_on(tmp_path: Path) -> None:
    process = toy(tmp_path, "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)")
    process.start()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 7
    assert sorted(process.tail().splitlines()) == ["one", "two"]
    assert len(process.tail(1).splitlines()) == 1


def test_exit_code_names_the_signal_that_ended_the_command(tmp_path: Path) -> None:
    process = toy(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    process.start()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 128 + signal.SIGSEGV


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    process = SupervisedProcess(["no-such-program"], os.environ, tmp_path / "log")
    process.start()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 127
    assert "cannot run no-such-program" in process.tail()


def test_a_suspended_process_of_the_family_is_noticed(tmp_path: Path) -> None:
    process, pids = start_family(tmp_path)
    try:
        assert not process.is_suspended()
        os.kill(pids[-1], signal.SIGSTOP)
        wait_for(process.is_suspended)
        os.kill(pids[-1], signal.SIGCONT)
        wait_for(lambda: not process.is_suspended())
    finally:
        process.stop(0)


def test_stop_lets_the_command_end_by_itself_first(tmp_path: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("up", flush=True)
time.sleep(600)
"""
    process = toy(tmp_path, code)
    process.start()
    wait_for(lambda: "up" in process.tail())
    assert process.stop(grace_s=60) == 5
    assert process.stop() == 5  # again: nothing happens


def test_stop_ends_children_that_ignore_sigterm_or_left_the_session(tmp_path: Path) -> None:
    process, pids = start_family(tmp_path)
    assert process.stop(grace_s=0.1) == 128 + signal.SIGKILL
    assert running(pids) == []


def test_children_end_when_the_command_is_killed(tmp_path: Path) -> None:
    process, pids = start_family(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: process.poll() is not None)
    assert running(pids) == []


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    process, pids = start_family(tmp_path)
    assert process.supervisor_pid is not None
    os.kill(process.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not running(pids[:1]))  # the kernel ends the command
    wait_for(lambda: process.poll() is not None)
    left_its_session = pids[2:]
    assert [pid for pid in running(pids) if pid not in left_its_session] == []
    for pid in running(left_its_session):
        os.kill(pid, signal.SIGKILL)


def test_everything_ends_when_the_owner_is_killed_even_if_a_fork_holds_the_pipe(tmp_path: Path) -> None:
    notes = tmp_path / "pids"
    command = [sys.executable, "-c", OWNER, FAMILY, str(notes), str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        assert owner.stdout is not None
        supervisor = int(owner.stdout.readline())
        wait_for(lambda: len(pids_of(notes)) == 4)
        owner.kill()
        owner.wait()
        wait_for(lambda: not running([*pids_of(notes), supervisor]))
    finally:
        os.killpg(owner.pid, signal.SIGKILL)  # the fork


def test_temporary_files_and_named_shared_memory_are_removed(tmp_path: Path) -> None:
    prefix = f"slime_test_{os.getpid()}_"
    shm = Path(f"/dev/shm/{prefix}a")
    code = f"""
import mmap, os, tempfile, time
with open({str(shm)!r}, "wb+") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print(tempfile.mkstemp()[1], flush=True)
time.sleep(600)
"""
    process = SupervisedProcess([sys.executable, "-c", code], os.environ, tmp_path / "log", shm_prefix=prefix)
    process.start()
    wait_for(lambda: process.tail() != "")
    temporary = Path(process.tail())
    assert temporary.exists() and shm.exists()
    process.stop(grace_s=0)
    assert not temporary.parent.exists()
    assert not shm.exists()


def test_shared_memory_of_a_command_that_ends_before_it_is_looked_at_is_removed(tmp_path: Path) -> None:
    prefix = f"slime_test_{os.getpid()}_"
    left, used = Path(f"/dev/shm/{prefix}left"), Path(f"/dev/shm/{prefix}used")
    code = f"import sys; open({str(left)!r}, 'w').close(); sys.exit(3)"
    process = SupervisedProcess([sys.executable, "-c", code], os.environ, tmp_path / "log", shm_prefix=prefix)
    with used.open("wb+") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):  # by another server that has just begun
            process.start()
            wait_for(lambda: process.poll() is not None)
    try:
        assert process.poll() == 3 and used.exists() and not left.exists()
    finally:
        used.unlink()


@pytest.mark.parametrize("name", ["torch_PID_12_0", "sgl_shm_mq_PID_ad856ea3"])  # torch's and SGLang's
def test_shared_memory_with_the_pid_of_a_command_is_removed(tmp_path: Path, name: str) -> None:
    code = f"""
import os, time
path = "/dev/shm/{name}".replace("PID", str(os.getpid()))
open(path, "w").close()
print(path, flush=True)
time.sleep(600)
"""
    foreign = Path("/dev/shm") / name.replace("PID", f"{os.getpid()}")
    foreign.touch()
    process = toy(tmp_path, code)
    process.start()
    try:
        wait_for(lambda: process.tail() != "")
        assert Path(process.tail()).exists()
        process.stop(grace_s=0)
        assert Path(process.tail()).exists() is False and foreign.exists()
    finally:
        foreign.unlink()


def test_one_thread_may_look_while_another_stops_it(tmp_path: Path) -> None:
    process, stopped = toy(tmp_path, "import time; time.sleep(600)"), threading.Event()

    def look() -> None:
        while not stopped.is_set():
            process.is_running()

    with ThreadPoolExecutor(3) as pool:
        watchers = [pool.submit(look) for _ in range(3)]
        try:
            for _ in range(5):
                process.start()
                process.stop(grace_s=0)
        finally:
            stopped.set()
    assert [watcher.result() for watcher in watchers] == [None] * 3


def test_it_can_be_started_again_but_not_twice(tmp_path: Path) -> None:
    process = toy(tmp_path, "import time; time.sleep(600)")
    process.start()
    with pytest.raises(RuntimeError, match="runs already"):
        process.start()
    process.stop(grace_s=0)
    process.start()
    assert process.is_running()
    process.stop(grace_s=0)


def test_descendants_are_found_over_generations(tmp_path: Path) -> None:
    process, pids = start_family(tmp_path)
    assert process.supervisor_pid is not None
    assert sorted(supervise.descendants(process.supervisor_pid)) == sorted(pids)
    process.stop(grace_s=0)
