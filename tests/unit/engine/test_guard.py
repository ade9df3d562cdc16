"""Engines and router that fail on command: who gets traffic, what is restarted, when the run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.engine.guard import FAULTS_LOG, EngineGuard, EngineState


class ScriptedRouter:
    def __init__(self) -> None:
        self.behind: list[str] = []
        self.alive = self.answering = True
        self.num_restarts = 0
        self.ended = threading.Event()
        self.refused: list[str] = []

    def is_alive(self) -> bool:
        return self.alive

    def answers(self, timeout_s: float) -> bool:
        return self.alive and self.answering

    def end(self) -> None:
        self.alive = False
        self.ended.set()

    def restart(self) -> None:
        self.alive = self.answering = True
        self.behind = []
        self.num_restarts += 1

    def add_worker(self, url: str) -> None:
        if url in self.refused:
            raise RuntimeError(f"did not take engine {url} within 60 s")
        self.behind.append(url)

    def remove_worker(self, url: str) -> None:
        if not self.alive:
            raise RuntimeError("the router does not answer")
        if not self.answering:  # its process is stopped: a call gets no answer before that is ended
            assert self.ended.wait(60)
            raise RuntimeError("no answer: connection reset")
        if url in self.behind:
            self.behind.remove(url)


class ScriptedEngine:
    def __init__(self, name: str) -> None:
        self.name, self.generation = name, 0
        self.ended: str | None = None
        self.answering = True
        self.failing_starts = 0
        self.silent_probes = 0  # that many are not answered yet
        self.answered_at = self.restarted_at = 0.0

    @property
    def url(self) -> str:
        return f"{self.name}{self.generation}"

    def end_message(self) -> str | None:
        return self.ended

    def weight_version(self) -> int | None:
        return None

    def restart(self) -> str:
        if self.failing_starts:
            self.failing_starts -= 1
            raise RuntimeError("no memory")
        self.restarted_at = time.monotonic()
        self.generation += 1
        self.ended, self.answering = None, True
        return self.url


class Scene:
    """Two engines behind a router, looked after every few milliseconds."""

    def __init__(self, folder: Path, *flags: str, **options: Any) -> None:
        defaults = ("--engine-health-interval-s", "0.02", "--engine-health-timeout-s", "0.2")
        self.router = ScriptedRouter()
        self.engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        self.guard = EngineGuard(make_config(folder, *defaults, *flags), self.router, self.probe, **options)
        self.guard.begin([(engine, engine.url) for engine in self.engines])

    @property
    def log(self) -> str:
        return (self.guard.run_dir / "logs" / FAULTS_LOG).read_text()

    def probe(self, url: str, timeout_s: float) -> bool:
        engine = next(e for e in self.engines if e.name == url[0])
        if engine.silent_probes:
            engine.silent_probes -= 1
            return False
        answers = url == engine.url and engine.answering and engine.ended is None
        if answers:
            engine.answered_at = time.monotonic()
        return answers

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.guard._members
            time.sleep(0.01)


def test_a_dead_engine_leaves_the_router_and_comes_back_only_when_admitted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engines[0].ended = "was ended by signal 9 (SIGKILL)"
    scene.wait_for(lambda: scene.guard.urls(EngineState.STALE) == ["a1"])
    assert scene.router.behind == ["b0"]
    assert scene.guard.urls(EngineState.SERVING) == ["b0"]
    assert scene.guard.admit("a1")
    assert scene.router.behind == ["b0", "a1"]
    assert not scene.guard.admit("a1"), "it serves already"
    assert "engine 0 was ended by signal 9 (SIGKILL); restarting" in scene.log
    scene.guard.close()


def test_the_others_are_told_of_a_loss(tmp_path: Path) -> None:
    told: list[list[str]] = []
    scene = Scene(tmp_path, on_loss=told.append)
    scene.engines[0].ended = "exited with 1"
    scene.wait_for(lambda: bool(told))
    assert told == [["b0"]]
    scene.guard.close()


def test_a_hung_engine_is_replaced_after_the_timeout(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engines[1].answering = False
    scene.wait_for(lambda: scene.guard.urls(EngineState.STALE) == ["b1"])
    assert 0.2 <= scene.engines[1].restarted_at - scene.engines[1].answered_at < 60
    assert "engine 1 has not answered its health checks for" in scene.log
    scene.guard.close()


def test_a_short_silence_is_forgiven(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-health-timeout-s", "2.0")
    began = time.monotonic()
    while time.monotonic() - began < 2.5:  # several silences that are too long together only
        scene.engines[1].silent_probes = 3
        scene.wait_for(lambda: scene.engines[1].silent_probes == 0)
        silent_until = time.monotonic()
        scene.wait_for(lambda silent_until=silent_until: scene.engines[1].answered_at > silent_until)
    assert scene.guard.urls(EngineState.SERVING) == ["a0", "b0"]
    assert scene.guard.num_restarts == {"engine": 0, "router": 0}
    scene.guard.close()


def test_a_slow_engine_gets_no_requests_until_it_is_in_time_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-slow-s", "0.1", "--engine-health-timeout-s", "60")
    scene.engines[0].answering = False
    scene.wait_for(lambda: scene.guard.urls(EngineState.SLOW) == ["a0"])
    scene.wait_for(lambda: scene.router.behind == ["b0"])
    scene.engines[1].answering = False
    time.sleep(0.3)
    assert scene.guard.urls(EngineState.SERVING) == ["b0"], "the last one stays"
    scene.engines[0].answering = True
    scene.wait_for(lambda: scene.guard.urls(EngineState.SERVING) == ["a0"] and scene.router.behind == ["a0"])
    assert scene.guard.urls(EngineState.SLOW) == ["b0"], "now that another one serves"
    assert (scene.guard.num_slow, scene.guard.num_restarts["engine"]) == (2, 0)
    assert "engine 0 needs over 0.1 s to answer (--engine-slow-s): no requests" in scene.log
    scene.wait_for(lambda: "engine 0 gets requests again" in scene.log)
    scene.guard.close()


def test_a_slow_engine_serves_when_it_is_the_only_one_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-slow-s", "0.1", "--engine-health-timeout-s", "60")
    scene.engines[0].answering = False
    scene.wait_for(lambda: scene.guard.urls(EngineState.SLOW) == ["a0"])
    scene.engines[1].failing_starts = 10_000
    scene.engines[1].ended = "exited with 1"
    scene.wait_for(lambda: scene.guard.urls(EngineState.SERVING) == ["a0"] and scene.router.behind == ["a0"])
    assert scene.guard.urls(EngineState.SLOW) == []
    scene.guard.close()


def test_an_engine_that_keeps_its_weights_serves_as_soon_as_it_answers(tmp_path: Path) -> None:
    scene = Scene(tmp_path, keeps_weights=True, label="judge: ")
    scene.engines[0].ended = "exited with 1"
    scene.wait_for(lambda: scene.guard.urls(EngineState.SERVING) == ["a1", "b0"])
    assert scene.router.behind == ["b0", "a1"]
    assert " judge: engine 0 exited with 1; restarting" in scene.log
    scene.guard.close()


def test_what_the_weight_sync_reports_is_acted_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-health-interval-s", "60")
    scene.guard.report("b0", "failed in the weight update to version 3: no answer")
    scene.wait_for(lambda: scene.guard.urls(EngineState.STALE) == ["b1"])
    assert "engine 1 failed in the weight update to version 3: no answer" in scene.log
    scene.guard.report("b0", "an address of the past")
    assert scene.guard.urls(EngineState.STALE) == ["b1"]
    scene.guard.close()


def test_the_first_wait_leaves_a_new_engine_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-health-first-wait-s", "30")
    scene.engines[0].ended = "exited with 1"
    time.sleep(0.3)
    assert scene.guard.urls(EngineState.SERVING) == ["a0", "b0"]
    scene.guard.close()


def test_a_router_that_hangs_is_replaced_while_a_call_waits_for_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.router.answering = False
    scene.engines[0].ended = "exited with 1"  # is taken out of the router, which does not answer
    scene.wait_for(lambda: scene.router.num_restarts == 1 and scene.router.behind == ["b0"])
    assert "the router has not answered for" in scene.log
    scene.guard.close()


def test_a_lost_router_is_restarted_with_the_serving_engines_only(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engines[0].ended = "exited with 1"
    scene.wait_for(lambda: scene.guard.urls(EngineState.STALE) == ["a1"])
    scene.router.alive = False
    scene.wait_for(lambda: scene.router.num_restarts == 1 and scene.router.behind == ["b0"])
    scene.router.answering = False
    scene.wait_for(lambda: scene.router.num_restarts == 2)
    assert "the router has not answered for" in scene.log
    scene.guard.close()


def test_a_router_of_two_models_is_watched_by_one_of_them_and_filled_for_both(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    judge = ScriptedEngine("j")
    scene.engines.append(judge)
    config = make_config(tmp_path, "--engine-health-interval-s", "0.02", "--engine-health-timeout-s", "0.2")
    options: dict[str, Any] = {"keeps_weights": True, "label": "judge: ", "lead": scene.guard}
    beside = EngineGuard(config, scene.router, scene.probe, **options)
    beside.begin([(judge, judge.url)])
    assert scene.router.behind == ["a0", "b0", "j0"]
    scene.router.alive = False
    scene.wait_for(lambda: sorted(scene.router.behind) == ["a0", "b0", "j0"] and scene.router.num_restarts == 1)
    judge.ended = "exited with 1"
    scene.wait_for(lambda: beside.urls(EngineState.SERVING) == ["j1"])
    assert sorted(scene.router.behind) == ["a0", "b0", "j1"]
    assert (scene.guard.num_restarts, beside.num_restarts) == ({"engine": 0, "router": 1}, {"engine": 1, "router": 0})
    for guard in (beside, scene.guard):
        guard.check()
        guard.close()


def test_an_engine_lost_with_the_router_keeps_it_from_nobody_and_comes_back_when_it_answers(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-health-timeout-s", "60")
    scene.engines[0].answering = False  # nobody knows yet whether it is lost
    scene.router.refused = ["a0"]
    scene.router.alive = False
    scene.wait_for(lambda: scene.router.num_restarts == 1 and scene.router.behind == ["b0"])
    scene.wait_for(lambda: scene.guard.urls(EngineState.SERVING) == ["b0"])
    scene.guard.check()
    scene.router.refused = []
    scene.engines[0].answering = True
    scene.wait_for(lambda: scene.guard.urls(EngineState.SERVING) == ["a0", "b0"])
    assert scene.router.behind == ["b0", "a0"]
    assert scene.guard.num_restarts == {"engine": 0, "router": 1}
    scene.guard.close()


def test_an_engine_that_a_new_router_does_not_take_is_replaced(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--engine-health-interval-s", "0.2")
    scene.router.refused = ["a0"]
    scene.router.alive = False
    scene.wait_for(lambda: scene.guard.urls(EngineState.STALE) == ["a1"])
    assert scene.router.behind == ["b0"]
    assert "engine 0 was not taken by the new router; restarting" in scene.log
    assert scene.guard.admit("a1")
    scene.guard.check()
    scene.guard.close()


def test_an_engine_that_ends_is_found_while_a_call_of_another_waits_for_the_router(tmp_path: Path) -> None:
    scene = Scene(tmp_path, keeps_weights=True)
    with scene.guard._router_lock:  # who waits for a router that hangs holds it
        scene.engines[0].ended = "exited with 1"
        scene.wait_for(lambda: scene.guard.urls(EngineState.DOWN) == ["a0"])
        scene.engines[1].answered_at = 0.0
        scene.wait_for(lambda: scene.engines[1].answered_at > 0)  # and the other is still looked after
        assert scene.guard.urls(EngineState.DOWN) == ["a0"]
    scene.guard.close()


def test_an_engine_that_does_not_start_is_tried_within_the_budget(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--max-engine-restarts", "3")
    scene.engines[0].failing_starts = 2
    scene.engines[0].ended = "exited with 1"
    scene.wait_for(lambda: scene.guard.urls(EngineState.STALE) == ["a1"])
    scene.guard.check()
    scene.engines[0].ended = "exited with 2"

    def failed() -> bool:
        try:
            scene.guard.check()
        except RuntimeError as error:
            assert str(error) == "engine 0 exited with 2\n--max-engine-restarts 3 allows no further restart"
            return True
        return False

    scene.wait_for(failed)
    scene.guard.close()


def test_without_a_budget_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--max-engine-restarts", "0")
    scene.router.alive = False
    scene.wait_for(lambda: scene.guard._failure is not None)
    with pytest.raises(RuntimeError, match="the router has ended\n--max-engine-restarts 0 allows no further restart"):
        scene.guard.check()
    assert scene.router.num_restarts == 0
    scene.guard.close()
