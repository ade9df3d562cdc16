"""One engine as the driver sees it: Ray actors that run its server, or a server that somebody else runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_rl.cluster.errors import no_place, root_cause
from slime_rl.cluster.placement import EngineSeat, Placement
from slime_rl.config import Config
from slime_rl.engine.control import EngineControl, EngineError
from slime_rl.engine.ports import free_port
from slime_rl.engine.server import PORT_TRIES, EngineServer, answers

_ACTOR_ANSWER_S = 10.0
_LOOK_S = 0.2  # between looks at the parts of an engine that starts
_REASON_SHOWS_S = 3.0
_RESTART_MARGIN_S = 30.0  # what ending the old server may take on top of the new one's start


class EngineActor:
    """Runs in its own Ray worker; the server below it lives in a process group that dies with this worker."""

    def __init__(self, config: Config, index: int, run_dir: str, gpus: tuple[int, ...], node_rank: int) -> None:
        host = serving_host(config)
        self.server = EngineServer(config, index, Path(run_dir), gpus, host=host, node_rank=node_rank)

    def meeting(self) -> str:
        """`host:port` of this node that nobody uses."""
        return f"{self.server.host}:{free_port(self.server.host)}"

    def start(self) -> str:
        """Start the server, wait until it is healthy, return its URL."""
        self.server.start()
        return self.server.url

    def restart(self) -> str:
        """The same after an end; the log so far is kept."""
        self.server.restart()
        return self.server.url

    def keep_log(self) -> None:
        self.server.keep_log()

    def launch(self, meeting: str) -> None:
        """Begin to start this node's part of an engine, which the others wait for."""
        self.server.launch(meeting)

    def look(self, is_late: bool) -> str | None:
        """URL of the launched server; None while it starts. Raises why it will not serve, or does not and is late."""
        serves = self.server.look()
        if serves:
            return self.server.url
        if serves is None and not is_late:
            return None
        error = self.server.failure()
        self.server.stop()
        raise error

    def port_was_taken(self) -> bool:
        return self.server.port_was_taken()

    def end_message(self) -> str | None:
        return self.server.end_message()

    def stop(self) -> None:
        self.server.stop()


class EngineHandle:
    """The driver's side of one engine: an actor on each of its nodes, of which the first takes requests. Lost Ray
    workers are replaced by others in the same bundles."""

    def __init__(self, config: Config, placement: Placement, index: int, seats: Sequence[EngineSeat]) -> None:
        self.config, self.placement, self.index, self.seats = config, placement, index, list(seats)
        self.actors = self._make([gpus for _, gpus in seats])

    def _make(self, gpus: Sequence[tuple[int, ...]]) -> list[Any]:
        config, index, run_dir = self.config, self.index, str(self.config.run_dir)
        return [
            ray.remote(EngineActor).options(**options).remote(config, index, run_dir, own, rank)
            for rank, ((options, _), own) in enumerate(zip(self.seats, gpus, strict=True))
        ]

    def begin(self) -> Any:
        """Start the server; the reference resolves to its URL."""
        return self._on_all("start")

    def _on_all(self, method: Literal["start", "restart"]) -> Any:
        if len(self.actors) == 1:
            return getattr(self.actors[0], method).remote()
        limit_s = self.config.cluster.start_timeout_s
        return ray.remote(_start_together).options(num_cpus=0).remote(self.actors, limit_s, method == "restart")

    def stop(self) -> list[Any]:
        """Begin to end the server; references to wait for."""
        return [actor.stop.remote() for actor in self.actors]

    def end_message(self) -> str | None:
        """See engine.guard.Restartable. A worker that does not answer says nothing about its server."""
        asked = [actor.end_message.remote() for actor in self.actors]
        for rank, answer in enumerate(asked):
            where = f"(node {rank} of {len(asked)}) " if len(asked) > 1 else ""
            message: str | None
            try:
                message = ray.get(answer, timeout=_ACTOR_ANSWER_S)
            except GetTimeoutError:
                continue
            except RayActorError:
                message = "was lost with its Ray worker"
            if message is not None:
                return where + message
        return None

    def weight_version(self) -> int | None:
        """See engine.guard.Restartable; nobody else restarts it."""
        return None

    def restart(self) -> str:
        """See engine.guard.Restartable."""
        limit_s = self.config.cluster.start_timeout_s + _RESTART_MARGIN_S
        if len(self.actors) == 1:  # parts of one engine would wait for one that is lost: they start anew
            try:
                return ray.get(self._on_all("restart"), timeout=limit_s)
            except RayTaskError as error:
                raise RuntimeError(str(root_cause(error))) from error
            except (GetTimeoutError, RayActorError):
                pass
        for actor in self.actors:
            ray.kill(actor)  # its server ends with it
        self.actors = self._make(self.placement.present_gpus(self.seats))
        try:
            return ray.get(self._on_all("restart"), timeout=limit_s)
        except GetTimeoutError as error:  # most likely Ray waits for a node in place of a lost one
            raise no_place(limit_s) from error
        except (RayTaskError, RayActorError) as error:
            raise RuntimeError(str(root_cause(error))) from error


def _start_together(actors: list[Any], limit_s: float, keep_logs: bool) -> str:
    """Start the parts of one engine, each of which waits for the others; the URL of the first. The first failure ends
    all of them; where a port was taken they start again, at another meeting, within the same time."""
    deadline = time.monotonic() + limit_s
    if keep_logs:
        ray.get([actor.keep_log.remote() for actor in actors])
    for attempt in range(PORT_TRIES):
        meeting = ray.get(actors[0].meeting.remote())
        try:
            ray.get([actor.launch.remote(meeting) for actor in actors])
            while True:
                is_late = time.monotonic() > deadline
                urls = ray.get([actor.look.remote(is_late) for actor in actors])
                if all(urls):
                    return urls[0]
                time.sleep(_LOOK_S)
        except RayTaskError:
            is_retried = attempt < PORT_TRIES - 1 and _port_was_taken(actors)
            ray.get([actor.stop.remote() for actor in actors])
            if not is_retried:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _port_was_taken(actors: list[Any]) -> bool:
    """Whether a port is the reason. A part that met a stranger there may fail before the one that wanted to listen."""
    deadline = time.monotonic() + _REASON_SHOWS_S
    while not (found := any(ray.get([actor.port_was_taken.remote() for actor in actors]))):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    return found


class ExternalEngine:
    """A server that somebody else runs (--rollout-external-engine-addrs): it is waited for, never started or ended."""

    def __init__(self, config: Config, url: str) -> None:
        self.url, self.limit_s = url.rstrip("/"), config.cluster.start_timeout_s
        self.headers = config.engine.authorization

    def begin(self) -> Any:
        """As EngineHandle.begin."""
        return ray.remote(_await_answer).options(num_cpus=0).remote(self.url, self.limit_s)

    def end_message(self) -> str | None:
        """Nothing is known of its process."""
        return None

    def weight_version(self) -> int | None:
        """See engine.guard.Restartable; None when it does not tell a number."""

        async def ask() -> str:
            async with EngineControl(self.url, _ACTOR_ANSWER_S, headers=self.headers) as control:
                return await control.weight_version()

        try:
            told = asyncio.run(ask())
        except EngineError:
            return None  # the next health check looks into it
        return int(told) if told.isdecimal() else None

    def restart(self) -> str:
        """Wait until it answers again; who runs it must start it."""
        return _await_answer(self.url, self.limit_s)

    def stop(self) -> list[Any]:
        """It goes on."""
        return []


def _await_answer(url: str, limit_s: float) -> str:
    deadline = time.monotonic() + limit_s
    while not answers(f"{url}/health"):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"--rollout-external-engine-addrs: {url} does not answer within --start-timeout-s {limit_s:g}"
            )
        time.sleep(0.5)
    return url


def serving_host(config: Config) -> str:
    """The address that servers of this process listen on: nobody else's business on a machine of its own, else the
    network of the cluster (not every network of the machine)."""
    return "127.0.0.1" if config.cluster.ray_address is None else ray.util.get_node_ip_address()
