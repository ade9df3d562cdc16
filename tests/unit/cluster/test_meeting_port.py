"""The start of one engine's parts on several nodes, with a Ray that calls at once and servers that only answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from slime_rl.cluster import engine_handle
from slime_rl.cluster.engine_handle import _start_together
from slime_rl.engine.server import PORT_TRIES


class Part:
    """Stands for an EngineActor; `looks` are what `look` answers or raises after each launch, in turn."""

    def __init__(self, rank: int, calls: list[str], looks: list[list[Any]], taken: list[bool] | None = None) -> None:
        self.rank, self.calls, self.looks, self.taken = rank, calls, looks, taken or []
        self.meetings = 0

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Callable[[], Any]:
            return lambda: getattr(self, f"do_{method}")(*args)

        return SimpleNamespace(remote=remote)

    def do_meeting(self) -> str:
        self.meetings += 1
        return f"node:{self.meetings}"

    def do_launch(self, meeting: str) -> None:
        self.calls.append(f"{self.rank} launch {meeting}")
        self.now = self.looks.pop(0)

    def do_look(self, is_late: bool) -> str | None:
        answer = self.now.pop(0) if len(self.now) > 1 else self.now[0]
        if isinstance(answer, str) and answer.startswith("engine"):
            raise RayTaskError("look", answer, RuntimeError())
        if answer is None and is_late:
            raise RayTaskError("look", f"engine {self.rank} was not healthy", RuntimeError())
        return answer

    def do_port_was_taken(self) -> bool:
        return self.taken.pop(0) if self.taken else False

    def do_keep_log(self) -> None:
        self.calls.append(f"{self.rank} keep_log")

    def do_stop(self) -> None:
        self.calls.append(f"{self.rank} stop")


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.get` makes the call; no time passes for sleeps."""
    get = lambda asked: [one() for one in asked] if isinstance(asked, list) else asked()  # noqa: E731
    monkeypatch.setattr(engine_handle, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(engine_handle, "_LOOK_S", 0.0)
    monkeypatch.setattr(engine_handle, "_REASON_SHOWS_S", 0.0)


FAILED = "engine 0 ended while it started, exit code 1"


def test_all_parts_are_waited_for_and_the_first_has_the_url() -> None:
    calls: list[str] = []
    parts = [Part(0, calls, [[None, "http://0"]]), Part(1, calls, [[None, None, None, "http://1"]])]
    assert _start_together(parts, 60.0, keep_logs=True) == "http://0"
    assert calls == ["0 keep_log", "1 keep_log", "0 launch node:1", "1 launch node:1"]


@pytest.mark.parametrize("first", [0, 1], ids=["leader", "follower"])
def test_where_the_meeting_is_taken_all_start_again_at_another(first: int) -> None:
    """Whichever part fails first: the follower meets a stranger there, and only the leader's log has the reason."""
    calls: list[str] = []
    looks: list[list[Any]] = [[None], [None]]
    looks[first] = [None, FAILED]
    leader = Part(0, calls, [looks[0], ["http://0"]], taken=[first == 0, True])
    follower = Part(1, calls, [looks[1], ["http://1"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_handle, "_REASON_SHOWS_S", 60.0)
        assert _start_together([leader, follower], 60.0, keep_logs=False) == "http://0"
    starts = [f"{rank} launch node:{meeting}" for meeting in (1, 2) for rank in (0, 1)]
    assert calls == [*starts[:2], "0 stop", "1 stop", *starts[2:]]


def test_a_port_that_is_always_taken_and_any_other_failure_end_it() -> None:
    for taken, launches in ((True, PORT_TRIES), (False, 1)):
        calls: list[str] = []
        leader = Part(0, calls, [[FAILED] for _ in range(PORT_TRIES)], taken=[taken] * PORT_TRIES)
        follower = Part(1, calls, [[None] for _ in range(PORT_TRIES)])
        with pytest.raises(RayTaskError, match="ended while it started"):
            _start_together([leader, follower], 60.0, keep_logs=False)
        assert len([call for call in calls if call.startswith("0 launch")]) == launches
        assert calls[-2:] == ["0 stop", "1 stop"], "nothing is left running"


def test_parts_that_are_late_end_it() -> None:
    parts = [Part(0, [], [["http://0"]]), Part(1, [], [[None]])]
    with pytest.raises(RayTaskError, match="engine 1 was not healthy"):
        _start_together(parts, -1.0, keep_logs=False)
