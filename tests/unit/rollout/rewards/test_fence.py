from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest
from processes import running, wait_for

from slime_rl.rollout.rewards import landlock
from slime_rl.rollout.rewards.fence import FenceAnswer, ProcessFence, current_fence, decode_answer, use_fence
from slime_rl.rollout.rewards.fence_protocol import Failure

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that tidies on a busy machine is waited for."""
    monkeypatch.setattr("slime_rl.rollout.rewards.fence.GRACE_S", 60.0)


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def others() -> set[psutil.Process]:
    """Processes that earlier tests left to this one's process, such as torch's shared-memory manager."""
    return descendants()


@pytest.fixture
def fence(monkeypatch: pytest.MonkeyPatch, others: set[psutil.Process]) -> Iterator[ProcessFence]:
    monkeypatch.syspath_prepend(str(HERE))  # so that fenced processes can import `hostile`
    with ProcessFence(1, timeout_s=60.0, memory_bytes=256 << 20) as fence:
        yield fence
    assert descendants() <= others


def call(fence: ProcessFence, name: str, *args: object, timeout_s: float | None = None) -> FenceAnswer:
    return asyncio.run(fence.call(f"hostile:{name}", *args, timeout_s=timeout_s))


def works(fence: ProcessFence) -> bool:
    return call(fence, "add", 2, 3) == FenceAnswer(value=5)


def test_a_call_gives_the_functions_value(fence: ProcessFence) -> None:
    assert works(fence)
    assert fence.counts() == {"calls": 1, "timeout": 0, "crash": 0, "memory": 0, "processes": 0, "error": 0}


def test_the_worker_is_reused_while_it_behaves(fence: ProcessFence) -> None:
    assert call(fence, "pid") == call(fence, "pid")


@pytest.mark.parametrize(
    ("name", "args", "failure"),
    [
        ("hang", (), Failure.TIMEOUT),
        ("spin", (), Failure.TIMEOUT),
        ("deep", (), Failure.ERROR),
        ("leave", (0,), Failure.CRASH),
        ("kill_self", (), Failure.CRASH),
        ("kill_parent", (), Failure.ERROR),
        ("open_parent", (), Failure.ERROR),
        ("allocate", (4 << 30,), Failure.MEMORY),
        ("close_files", (), Failure.CRASH),
        ("raise_error", (), Failure.ERROR),
        ("exit_program", (), Failure.ERROR),
        ("unserialisable", (), Failure.ERROR),
        ("huge_answer", (), Failure.CRASH),
        ("write_garbage", (), Failure.CRASH),
        ("forge_answer", (), Failure.CRASH),
        ("fork_bomb", (), Failure.PROCESSES),
        ("fork_bomb_in_sessions", (), Failure.PROCESSES),
        ("no_such_function", (), Failure.ERROR),
    ],
)
def test_a_hostile_call_costs_itself_only(
    fence: ProcessFence, name: str, args: tuple[object, ...], failure: Failure
) -> None:
    assert works(fence)
    assert call(fence, name, *args, timeout_s=0.5 if failure is Failure.TIMEOUT else 60.0).failure is failure
    assert works(fence)
    assert fence.counts()[failure] == 1


def test_a_call_cannot_signal_those_above_it_nor_everybody(fence: ProcessFence) -> None:
    assert call(fence, "signal_others", os.getpid()).value == [1], "only its own child"
    assert call(fence, "pid").value[1] == call(fence, "pid").value[1], "the supervisor lives"


def test_a_supervisor_that_is_killed_all_the_same_is_replaced(fence: ProcessFence) -> None:
    _, supervisor = call(fence, "pid").value
    os.kill(supervisor, signal.SIGKILL)
    assert call(fence, "add", 2, 3).failure is Failure.CRASH
    assert not list(Path(gettempdir()).glob(f"fence-{supervisor}-*")), "its worker's folder"
    assert works(fence)
    _, supervisor = call(fence, "pid").value
    assert list(Path(gettempdir()).glob(f"fence-{supervisor}-*")), "where they are looked for"


def test_a_call_reaches_no_process_but_its_own(fence: ProcessFence) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        owner = call(fence, "attack", os.getpid()).value
        other = call(fence, "attack", victim.pid).value
    finally:
        victim.kill()
        victim.wait()
    assert owner == ([] if landlock.keeps_signals() else ["memory"] * (os.geteuid() == 0)), "what worked"
    if landlock.keeps_signals():
        assert not {"sigqueue", "descriptor", "memory"} & set(other)


def test_the_processes_of_a_call_share_one_limit_of_memory(fence: ProcessFence) -> None:
    assert call(fence, "allocate_in_children", 3, 150 << 20, timeout_s=60.0).failure is Failure.MEMORY
    assert call(fence, "allocate_in_children", 3, 10 << 20, timeout_s=60.0).value == 3
    assert works(fence)


@pytest.mark.parametrize("name", ["hang", "daemon", "value"])
def test_temporary_files_of_a_call_are_removed_with_its_worker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ProcessFence(1, timeout_s=60.0) as fence:
        call(fence, "leave_files", name, timeout_s=1.0 if name == "hang" else 60.0)
        if name != "value":
            assert works(fence)
            assert len(list(tmp_path.iterdir())) == 1, "of the new worker"
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_ended_with_its_call_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bomb = "import os, time\nopen('f', 'w').close()\nfor _ in range(6): os.fork()\ntime.sleep(600)"
    with ProcessFence(1, timeout_s=60.0) as fence:
        answer = asyncio.run(fence.call("slime_rl.rollout.rewards.code_fenced:passes", bomb, "", "1", None, 30.0))
        assert answer.failure is Failure.PROCESSES
    assert list(tmp_path.iterdir()) == []


def test_an_import_that_hangs_or_exits_is_an_error_of_its_call(
    fence: ProcessFence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs_at_import.py").write_text("import time\nwhile True:\n    time.sleep(1)")
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, supervisor = call(fence, "pid").value
    for module, limit_s, message in (
        ("hangs_at_import", 0.5, "not done after 0.5 s"),
        ("exits_at_import", 60.0, "SystemExit: 3"),
    ):
        monkeypatch.setattr("slime_rl.rollout.rewards.fence.IMPORT_TIMEOUT_S", limit_s)
        answer = asyncio.run(fence.call(f"{module}:f"))
        assert answer.failure is Failure.ERROR and message in answer.message
    assert call(fence, "pid").value[1] == supervisor


def test_a_module_is_warmed_up_before_workers_are_forked(fence: ProcessFence) -> None:
    assert call(fence, "warmed_by_parent").value is True


def test_printing_a_lot_is_swallowed(fence: ProcessFence) -> None:
    assert call(fence, "print_much", 100 << 20).value == 100 << 20


def test_a_daemon_left_behind_is_killed(fence: ProcessFence, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    assert call(fence, "leave_daemon", str(path)).value == 1
    assert works(fence)
    assert running([int(path.read_text())]) == []


def test_an_error_keeps_its_message(fence: ProcessFence) -> None:
    assert call(fence, "raise_error").message == "RuntimeError: the judge fell asleep"


def test_a_module_that_cannot_be_imported_is_an_error(fence: ProcessFence) -> None:
    answer = asyncio.run(fence.call("no_such_module:score", 1))
    assert answer.failure is Failure.ERROR
    assert "no_such_module" in answer.message


def test_neighbours_go_on_while_one_call_hangs(fence: ProcessFence) -> None:
    async def scenario(pool: ProcessFence) -> tuple[list[FenceAnswer], bool, FenceAnswer]:
        hanging = asyncio.create_task(pool.call("hostile:hang", timeout_s=600.0))
        sums = await pool.call_many("hostile:add", [(i, 1) for i in range(100)])
        went_on = not hanging.done()
        hanging.cancel()
        return sums, went_on, await pool.call("hostile:hang", timeout_s=0.2)

    with ProcessFence(2, timeout_s=60.0) as pool:
        sums, went_on, late = asyncio.run(scenario(pool))
        assert [answer.value for answer in sums] == [i + 1 for i in range(100)] and went_on
        assert late.failure is Failure.TIMEOUT
        assert pool.metrics()["rewards/timeouts"] == 1.0
        assert pool.metrics()["rewards/calls"] == 101.0, "withdrawn ones do not count"


def test_a_cancelled_call_frees_its_worker_and_ends_what_it_started(fence: ProcessFence, tmp_path: Path) -> None:
    path = tmp_path / "pid"

    async def scenario() -> FenceAnswer:
        hanging = asyncio.create_task(fence.call("hostile:hang_with_a_daemon", str(path), timeout_s=600.0))
        while not (path.exists() and path.stat().st_size):
            await asyncio.sleep(0.01)
        hanging.cancel()
        async with asyncio.timeout(120):
            return await fence.call("hostile:add", 2, 3)

    assert asyncio.run(scenario()) == FenceAnswer(value=5)
    assert running([int(path.read_text())]) == []
    assert fence.counts() == {"calls": 1, "timeout": 0, "crash": 0, "memory": 0, "processes": 0, "error": 0}


def test_calls_beside_and_after_cancelled_ones_get_their_own_answers(fence: ProcessFence) -> None:
    async def scenario(pool: ProcessFence) -> list[tuple[int, FenceAnswer]]:
        kept = []
        for i in range(150):  # withdrawn while they wait, run, or have just been answered
            withdrawn = [asyncio.create_task(pool.call("hostile:add", i, -1000)) for _ in range(3)]
            await asyncio.sleep(i % 15 / 5000)
            for task in withdrawn:
                task.cancel()
            kept.append((i, await pool.call("hostile:add", i, 1)))
        return kept

    with ProcessFence(2, timeout_s=60.0) as pool:
        assert works(pool)
        kept = asyncio.run(scenario(pool))
        assert [answer.value for _, answer in kept] == [i + 1 for i, _ in kept]
        assert {name: number for name, number in pool.counts().items() if number and name != "calls"} == {}


def test_close_ends_running_calls_and_all_processes(fence: ProcessFence, others: set[psutil.Process]) -> None:
    async def scenario() -> FenceAnswer:
        hanging = asyncio.create_task(fence.call("hostile:hang", timeout_s=600.0))
        while descendants() <= others:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        async with asyncio.timeout(120):
            await asyncio.to_thread(fence.close)
            return await hanging

    assert asyncio.run(scenario()).failure is Failure.CRASH
    assert descendants() <= others


def test_no_process_survives_an_owner_that_is_killed() -> None:
    code = (
        "import asyncio\nfrom slime_rl.rollout.rewards.fence import ProcessFence\n"
        "fence = ProcessFence(1, 60.0)\nprint(*asyncio.run(fence.call('hostile:pid')).value, flush=True)\n"
        "asyncio.run(fence.call('hostile:spin'))\n"
    )
    path = os.pathsep.join([str(HERE), *sys.path])
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert running(pids) == pids and len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not running(pids))


def test_prewarm_starts_every_process_in_the_background(others: set[psutil.Process]) -> None:
    with ProcessFence(2, timeout_s=60.0) as fence:
        fence.prewarm("json")
        wait_for(lambda: len(descendants() - others) >= 2)
        assert len(set(psutil.Process().children()) - others) == 2
        assert fence.counts()["calls"] == 0


def test_current_fence_is_scoped_to_its_owner() -> None:
    with pytest.raises(LookupError, match="use_fence"):
        current_fence()
    with ProcessFence(1, 1.0) as fence:
        with use_fence(fence):
            assert current_fence() is fence
            assert asyncio.run(_fence_seen_by_a_task()) is fence
        with pytest.raises(LookupError):
            current_fence()


async def _fence_seen_by_a_task() -> ProcessFence:
    async def look() -> ProcessFence:
        return current_fence()

    return await asyncio.create_task(look())


@pytest.mark.parametrize("frame", [b"", b"[1]", b"3", b'{"failure": "tired"}', b"\xff", b"[" * 100_000])
def test_an_unreadable_answer_is_a_crash(frame: bytes) -> None:
    assert decode_answer(frame).failure is Failure.CRASH


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="num_workers >= 1"):
        ProcessFence(0, 1.0)
