"""Watches engines and router, replaces what fails, and says who may get traffic and weights.

    serving ──ended, hung──► down (out of the router) ──restart──► stale ──current weights, verified──► serving
       │                      │ budget used up: the run ends
       └─slower than --engine-slow-s, or silent when the router is replaced─► slow (out of it) ──in time─► serving

One thread for each engine and one for the router; the owner of the run asks `check` while it waits for anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol

from slime_rl.config import Config
from slime_rl.engine.server import answers

logger = logging.getLogger(__name__)

FAULTS_LOG = "faults.log"
NEW_ROUTER_PROBE_S = 5.0  # an engine that needs longer must not keep a new router from the others


class EngineState(StrEnum):
    SERVING = "serving"  # behind the router
    DOWN = "down"  # ended or hung; being replaced
    STALE = "stale"  # answers, but has not the current weights: no traffic
    SLOW = "slow"  # has the current weights, but answers too slowly, or not yet a new router: no traffic


class Restartable(Protocol):
    """An engine, wherever it runs."""

    def end_message(self) -> str | None:
        """How it ended; None while its process runs."""
        ...

    def restart(self) -> str:
        """End what is left and start anew; the new URL. RuntimeError when it does not start."""
        ...

    def weight_version(self) -> int | None:
        """What it serves, for engines that somebody else may restart at the same URL; None for all others."""
        ...


class GuardedRouter(Protocol):
    """What is needed of `engine.router.RouterProcess`."""

    def is_alive(self) -> bool: ...
    def answers(self, timeout_s: float) -> bool: ...
    def end(self) -> None: ...
    def restart(self) -> None: ...
    def add_worker(self, url: str) -> None: ...
    def remove_worker(self, url: str) -> None: ...


@dataclass
class _Member:
    index: int
    engine: Restartable
    url: str
    state: EngineState = EngineState.SERVING
    version: int = 0  # of its weights, as far as it tells
    reported: str | None = None  # what another part found wrong with it
    wake: threading.Event = field(default_factory=threading.Event)


class EngineGuard:
    """See the picture above. Public methods may be called from any thread.

    `probe(url, timeout_s)` says whether an engine's scheduler answers; an answer of the HTTP process alone would hide a
    hung scheduler. With `keeps_weights` engines get none from the trainer, so none is ever stale for long. Lines of the
    log begin with `label` ("judge: "). `on_loss(urls of the others)` is called when one was taken out of the router.
    `lead` is the guard of another model behind the same router, which watches and fills that for both.
    """

    def __init__(
        self,
        config: Config,
        router: GuardedRouter,
        probe: Callable[[str, float], bool] | None = None,
        *,
        keeps_weights: bool = False,
        label: str = "",
        on_loss: Callable[[list[str]], None] | None = None,
        lead: EngineGuard | None = None,
    ) -> None:
        self.keeps_weights, self.label, self.on_loss = keeps_weights, label, on_loss
        engine = config.engine
        self.first_wait_s, self.interval_s = engine.engine_health_first_wait_s, engine.engine_health_interval_s
        self.timeout_s, self.budget = engine.engine_health_timeout_s, engine.max_engine_restarts
        self.slow_s = engine.engine_slow_s
        headers = engine.authorization
        self.router = router
        self.probe = probe or (lambda url, timeout_s: scheduler_answers(url, timeout_s, headers))
        self.run_dir = Path(config.run_dir)
        self.num_restarts: dict[str, int] = {"engine": 0, "router": 0}
        self.num_slow = 0  # how often an engine was taken out for being slow
        self._members: list[_Member] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of states, counters and the failure
        self._router_lock = lead._router_lock if lead else threading.Lock()  # one change at a time; before _lock
        self._behind: list[EngineGuard] = [] if lead is None else lead._behind  # guards of all models of the router
        self._behind.append(self)
        self._closing = threading.Event()
        self._failure: RuntimeError | None = None

    def begin(self, engines: list[tuple[Restartable, str]]) -> None:
        """Put the started engines (each with its URL) behind the router and watch all of them."""
        for index, (engine, url) in enumerate(engines):
            with self._router_lock:
                self.router.add_worker(url)
                self._members.append(_Member(index, engine, url))
        loops: list[Callable[[], None]] = [partial(self._watch, member) for member in self._members]
        if self._behind[0] is self:
            loops.append(self._watch_router)
        self._threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise the RuntimeError that ends the run, if there is one."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def urls(self, *states: EngineState) -> list[str]:
        """Engines in one of `states`, by index."""
        with self._lock:
            return [member.url for member in self._members if member.state in states]

    def admit(self, url: str) -> bool:
        """stale -> serving, once its weights are known to be current; False when it is no longer stale."""
        with self._lock:
            member = next((m for m in self._members if m.url == url), None)
        if member is None or not self._put_back(member, EngineState.STALE):
            return False
        self._note(f"engine {member.index} serves again at {url}")
        return True

    def _put_back(self, member: _Member, came_from: EngineState) -> bool:
        """Behind the router, if it is still in that state; False when not, or when there is no router now."""
        with self._lock:
            if member.state is not came_from:  # nothing to do: do not wait for a router that hangs
                return False
        with self._router_lock:
            with self._lock:
                if member.state is not came_from:
                    return False
            try:
                self.router.add_worker(member.url)
            except RuntimeError as error:  # the router is being lost itself; the next attempt meets the new one
                logger.warning("engine %d cannot be put behind the router yet: %s", member.index, error)
                return False
            with self._lock:
                member.state = EngineState.SERVING
        return True

    def report(self, url: str, reason: str) -> None:
        """Another part found the engine unusable (`reason` follows its name): replace it at once."""
        with self._lock:
            member = next((m for m in self._members if m.url == url and m.state is not EngineState.DOWN), None)
        if member is not None:
            member.reported = reason
            member.wake.set()

    def close(self) -> None:
        """Stop watching. Threads that wait for a restart end with the process."""
        self._closing.set()
        for member in self._members:
            member.wake.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # whatever it is, the run must not go on unwatched
            failure = error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = None if failure is error else error
            with self._lock:
                self._failure = self._failure or failure

    def _watch(self, member: _Member) -> None:
        member.wake.wait(self.first_wait_s)
        answered = time.monotonic()
        while not self._closing.is_set():
            reason = None
            left_s = max(1.0, self.timeout_s - (time.monotonic() - answered))
            in_time = self.probe(member.url, left_s if self.slow_s is None else min(left_s, self.slow_s))
            if in_time:
                answered = time.monotonic()
                reason = self._forgotten(member)
            else:
                reason = self._what_is_wrong(member, time.monotonic() - answered)
            reason = member.reported or reason
            if reason is not None and not self._closing.is_set():
                self._replace(member, reason)
                member.wake.wait(self.first_wait_s)
                answered = time.monotonic()
            else:
                if self.keeps_weights:
                    self.admit(member.url)
                self._keep_pace(member, in_time)
            member.wake.wait(self.interval_s)
            member.wake.clear()

    def _forgotten(self, member: _Member) -> str | None:
        """That it was restarted by somebody else and has the weights that it started with."""
        before, now = member.version, member.engine.weight_version()
        member.version = before if now is None else now
        return f"has lost its weights: version 0 where it had {before}" if now == 0 < before else None

    def _keep_pace(self, member: _Member, in_time: bool) -> None:
        """Take a slow engine out of the router, but never the last one; put it back when it is in time again, or when
        it is the only one left."""
        can_be_slow = self.slow_s is not None  # else one that is not in time does not answer at all
        with self._lock:
            others = any(m.state is EngineState.SERVING for m in self._members if m is not member)
            goes = can_be_slow and member.state is EngineState.SERVING and not in_time and others
            if goes:
                member.state = EngineState.SLOW
                self.num_slow += 1
        if goes:
            self._take_out(member)
            self._note(f"engine {member.index} needs over {self.slow_s:g} s to answer (--engine-slow-s): no requests")
        elif (in_time or (can_be_slow and not others)) and self._put_back(member, EngineState.SLOW):
            self._note(f"engine {member.index} gets requests again")

    def _what_is_wrong(self, member: _Member, silent_s: float) -> str | None:
        ended = member.engine.end_message()
        if ended is None and silent_s >= self.timeout_s:
            return f"has not answered its health checks for {silent_s:.0f} s (--engine-health-timeout-s)"
        return ended

    def _replace(self, member: _Member, reason: str) -> None:
        with self._lock:
            member.state = EngineState.DOWN
        self._take_out(member)
        if self.on_loss is not None:
            self.on_loss(self.urls(EngineState.SERVING, EngineState.STALE))
        while True:
            self._spend("engine", f"engine {member.index} {reason}")
            try:
                url = member.engine.restart()
                break
            except RuntimeError as error:
                reason = f"did not start again: {error}"
        with self._lock:
            member.url, member.state, member.reported = url, EngineState.STALE, None
        more = "" if self.keeps_weights else "; it gets no traffic before it has current weights"
        self._note(f"engine {member.index} answers again at {url}{more}")

    def _take_out(self, member: _Member) -> None:
        """A router that does not answer is replaced by its own watch, with the serving engines only."""
        with self._router_lock:
            try:
                self.router.remove_worker(member.url)
            except RuntimeError as error:
                logger.warning("engine %d could not be taken out of the router: %s", member.index, error)

    def _watch_router(self) -> None:
        answered = time.monotonic()
        while not self._closing.wait(self.interval_s):
            if self.router.answers(max(1.0, self.timeout_s - (time.monotonic() - answered))):
                answered = time.monotonic()
                continue
            silent_s, what = time.monotonic() - answered, "has ended"
            if self.router.is_alive():
                if silent_s < self.timeout_s:
                    continue
                what = f"has not answered for {silent_s:.0f} s"
                self.router.end()  # who waits for its answer holds the lock
            with self._router_lock:
                if self._closing.is_set():
                    return
                self._spend("router", f"the router {what}")
                self.router.restart()
                for guard in self._behind:
                    guard._fill_router()
            answered = time.monotonic()
            self._note("the router serves again at its address")

    def _fill_router(self) -> None:
        """All at once: a new router waits for each engine that it is given, and one of them may be lost as well."""
        with self._lock:
            serving = [member for member in self._members if member.state is EngineState.SERVING]
        with ThreadPoolExecutor(max(1, len(serving)), "fill-router") as pool:
            list(pool.map(self._put_into_new_router, serving))

    def _put_into_new_router(self, member: _Member) -> None:
        """An engine that does not answer now gets requests again when it does, unless its own watch replaces it."""
        if self.probe(member.url, NEW_ROUTER_PROBE_S):
            try:
                self.router.add_worker(member.url)
                return
            except RuntimeError as error:
                logger.warning("engine %d could not be put behind the new router: %s", member.index, error)
                if self.router.answers(NEW_ROUTER_PROBE_S):  # else its watch starts another one
                    self.report(member.url, "was not taken by the new router")
        with self._lock:
            if member.state is EngineState.SERVING:
                member.state = EngineState.SLOW

    def _spend(self, what: str, reason: str) -> None:
        """Take one restart from the budget. Raises RuntimeError when there is none left."""
        with self._lock:
            if sum(self.num_restarts.values()) >= self.budget:
                raise RuntimeError(f"{reason}\n--max-engine-restarts {self.budget} allows no further restart")
            self.num_restarts[what] += 1
        self._note(f"{reason}; restarting")

    def _note(self, line: str) -> None:
        note_fault(self.run_dir, self.label + line)


def note_fault(run_dir: Path, line: str) -> None:
    """Add a line to RUN_DIR/logs/faults.log, and warn."""
    logger.warning(line)
    path = run_dir / "logs" / FAULTS_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.write(f"{datetime.now().isoformat(timespec='milliseconds')} {line}\n")


def scheduler_answers(url: str, timeout_s: float, headers: Mapping[str, str]) -> bool:
    """Whether the engine's scheduler answers. Unlike a generated token this works while the engine is paused."""
    return answers(f"{url}/server_info", timeout_s, headers)
