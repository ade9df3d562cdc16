from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_rl.rollout.rewards import landlock, own_user
from slime_rl.rollout.rewards.code_fenced import passes
from slime_rl.rollout.rewards.sandbox import run_program

AS_ROOT, LANDLOCK, FILTER_ONLY = "a user of its own", "landlock", "filter only"


def keep_by(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only this layer and the filter of system calls, as on another machine or for another user."""
    if layer == AS_ROOT and (os.geteuid() != 0 or own_user.number_for(()) is None):
        pytest.skip("only root can give a program a user")
    if layer == LANDLOCK and not landlock.keeps_signals():
        pytest.skip("this kernel's Landlock is too old")
    if layer != AS_ROOT:
        monkeypatch.setattr(own_user, "number_for", lambda paths: None)
    if layer != LANDLOCK:
        monkeypatch.setattr(landlock, "version", lambda: 0)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    assert process.poll() is None, "the victim lives"
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    process.kill()
    process.wait()


LIBC = "import ctypes\nL = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = {
    "kill": "import os\nos.kill(PID, 9)",
    "killpg": "import os\nos.killpg(PID, 9)",
    "sigqueue": LIBC + "if L.sigqueue(PID, 9, 0): raise PermissionError",
    "tgkill": LIBC + "if L.tgkill(PID, PID, 9): raise PermissionError",
    "pidfd": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(PID), 9)",
    "prlimit": "import resource\nresource.prlimit(PID, resource.RLIMIT_CPU, (1, 1))",
    "setpriority": "import os\nos.setpriority(os.PRIO_PROCESS, PID, 19)",
    "setpriority of the user": "import os\nos.setpriority(os.PRIO_USER, OWNER, 19)",
    "affinity": "import os\nos.sched_setaffinity(PID, {0})",
    "scheduler": "import os\nos.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))",
    "F_SETSIG": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 10, 9)",
    "F_SETOWN": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, PID)",
    "FIOSETOWN": "import fcntl, os, struct\nr, w = os.pipe()\nfcntl.ioctl(r, 0x8901, struct.pack('i', PID))",
    "ptrace": LIBC + "if L.ptrace(16, PID, 0, 0): raise PermissionError",
    "new namespaces": LIBC + "if L.unshare(0x10000000): raise PermissionError",
}
BY_FILE = {
    "memory": "open('/proc/PID/mem', 'r+b')",
    "environment": "open('/proc/PID/environ').read()",
    "oom_score_adj": "open('/proc/PID/oom_score_adj', 'w').write('1000')",
}


TRY_ALL = """
for name, program in ATTACKS.items():
    try:
        exec(program, {})
        print(name, "worked")
    except PermissionError:
        continue
"""


@pytest.mark.parametrize("layer", [AS_ROOT, LANDLOCK, FILTER_ONLY])
def test_a_program_reaches_no_other_process(
    layer: str, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_by(layer, monkeypatch)
    attacks = ATTACKS if layer == FILTER_ONLY else ATTACKS | BY_FILE
    named = repr(attacks).replace("PID", str(victim.pid)).replace("OWNER", str(os.geteuid()))
    run = run_program(TRY_ALL.replace("ATTACKS", named), "", 60.0)
    assert (run["status"], run["output"], run["errors"]) == (0, "", "")


HONEST = {
    "exit": ("print(5)\nexit()", "5"),
    "quit": ("print(5)\nquit()", "5"),
    "a package": ("import numpy as np\nprint(int(np.arange(3).sum()))", "3"),
    "a signal to itself": (
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print(1))\nsignal.raise_signal(signal.SIGUSR1)",
        "1",
    ),
    "threads": (
        "import threading, time\ndef late():\n    time.sleep(0.3)\n    print('x')\n"
        "threading.Thread(target=late).start()",
        "x",
    ),
    "its limits": ("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 20, -1))\nprint(1)", "1"),
    "an own process": ("import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', '']))", "b''"),
    "500 KB": ("print('x' * 500_000)", "x" * 500_000),
    "much on stderr": ("import sys\nsys.stderr.write('x' * 500_000)\nprint(1)", "1"),
    "asyncio": ("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(1)", "1"),
}


@pytest.mark.parametrize("layer", [AS_ROOT, LANDLOCK, FILTER_ONLY])
def test_honest_programs_pass(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_by(layer, monkeypatch)
    assert {name: passes(program, "", out, None, 60.0) for name, (program, out) in HONEST.items()} == dict.fromkeys(
        HONEST, ""
    )


@pytest.mark.parametrize("layer", [AS_ROOT, LANDLOCK])
def test_a_pool_of_processes_works(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_by(layer, monkeypatch)
    pool = (
        "from multiprocessing import Pool\ndef f(x): return x * x\nif __name__ == '__main__':\n"
        "    with Pool(2) as pool: print(sum(pool.map(f, range(4))))"
    )
    assert passes(pool, "", "14", None, 60.0) == ""


def test_a_program_sees_only_interpreter_and_system_where_there_is_landlock(tmp_path: Path) -> None:
    if not landlock.version():
        pytest.skip("no Landlock here")
    secret = tmp_path / "tests.jsonl"
    secret.write_text("the answer is 7")
    for act in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'a')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    ):
        run = run_program(act, "", 60.0)
        assert run["status"] == 1 and "PermissionError" in run["errors"], act


@pytest.mark.parametrize(
    "program",
    [
        "import os\nprint(open(__file__).read()[-40:], flush=True)\nos._exit(0)",
        "raise SystemExit(0)",
        "exit()",
        "import os, sys\nif __debug__: os.execv(sys.executable, [sys.executable, '-O', 'main.py'])\ndef f(x): return 0",
        "def f(x): return 0\nif 0:\n  ",
        "def f(x): raise SystemExit(0)",
        "def f(x): return 0\nimport builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
        "import os\nos.write = lambda *a: 1\ndef f(x): return 0",
        "import os, contextlib\ndef f(x):\n    for fd in range(3, 64):\n        with contextlib.suppress(OSError): "
        "os.write(fd, b'x' * 32)\n    os._exit(0)",
    ],
)
def test_statements_behind_a_program_are_not_passed_by_leaving_early(program: str) -> None:
    assert passes(program, "", None, "assert f(2) == 4", 60.0) in ("error", "assertion")


@pytest.mark.parametrize(
    "program",
    [
        "from __future__ import annotations\ndef f(x: Foo): return 4",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(n): return A(4).x",
        "def f(x): return 4\nif __name__ == '__main__':\n    n = input()",
        "import sys\nsys.stdout.write('hi')\ndef f(x): return 4",
        "import atexit\natexit.register(print, 'bye')\ndef f(x): return 4",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print(1))).start()\n"
        "def f(x): return 4",
    ],
)
def test_statements_behind_an_honest_program_pass(program: str) -> None:
    assert passes(program, "", None, "assert f(2) == 4", 60.0) == ""


READS_MEMORY = """
import os, re
pid, mark, found = os.getppid(), b"THE" + b"MARK", ""
for line in open(f"/proc/{pid}/maps"):
    span, rights = line.split()[:2]
    if rights.startswith("rw"):
        low, high = [int(x, 16) for x in span.split("-")]
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            memory.seek(low)
            if match := re.search(mark + b"(.*?)END", memory.read(high - low)):
                found = match.group(1)
print(found)
"""


@pytest.mark.parametrize("layer", [AS_ROOT, LANDLOCK])
def test_the_expected_output_is_out_of_a_programs_sight(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_by(layer, monkeypatch)
    assert passes(READS_MEMORY, "", "THEMARKsecretEND", None, 60.0) == "error"


@pytest.mark.parametrize("layer", [AS_ROOT, FILTER_ONLY])
@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
        "import os\nd = os.getcwd()\nos.chdir('/')\nos.rename(d, d + 'x')\nos.symlink('/etc', d)",
        "import os\nos.mkdir('a')\nopen('a/f', 'w').close()\nos.chmod('a', 0)\nos.chmod('.', 0)",
        "import os\nos.symlink('/etc', 'link')\nos.mkfifo('fifo')",
    ],
)
def test_a_program_leaves_nothing(layer: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_by(layer, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_program(program, "", 60.0)
    assert list(tmp_path.iterdir()) == []


def test_a_program_with_a_user_of_its_own_leaves_nothing_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_by(AS_ROOT, monkeypatch)
    left = Path(f"/dev/shm/left_by_test_{os.getpid()}")
    run = run_program(f"open({str(left)!r}, 'w').write('x')", "", 60.0)
    assert run["status"] == 0 and not left.exists()


def test_the_expected_output_is_out_of_sight_where_the_run_is_not_root_and_has_no_landlock() -> None:
    if os.geteuid() == 0 and own_user.number_for(()) is None:
        pytest.skip("root cannot change its user here")
    code = (
        "import asyncio, os\nfrom pathlib import Path\nfrom slime_rl.rollout.rewards import own_user\n"
        "if os.geteuid() == 0: own_user.become(20_000, [Path('/root')])\n"
        "from slime_rl.rollout.rewards.fence import ProcessFence\n"
        "async def go():\n    with ProcessFence(1, timeout_s=600.0) as fence:\n"
        "        args = PROGRAM, '', 'THEMARKsecretEND', None, 60.0\n"
        "        return await fence.call('sandbox_without_landlock:passes', *args)\n"
        "print(asyncio.run(go()).value)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    answer = subprocess.run(
        [sys.executable, "-c", code.replace("PROGRAM", repr(READS_MEMORY))],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "error", "the memory of the fence's processes cannot be opened"
