"""One engine as the driver sees it: Ray actors that run its server, or a server that somebody else runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_rl.cluster.errors import root_cause
from slime_rl.cluster.placement import EngineSeat, Placement
from slime_rl.config import Config
from slime_rl.engine.control import EngineControl, EngineError
from slime_rl.engine.ports import free_port
from slime_rl.engine.server import EngineServer, answers

_ACTOR_ANSWER_S = 10.0
_RESTART_MARGIN_S = 30.0  # what ending the old server may take on top of the new one's start


class EngineActor:
    """Runs in its own Ray worker; the server below it lives in a process group that dies with this worker."""

    def __init__(self, config: Config, index: int, run_dir: str, gpus: tuple[int, ...], node_rank: int) -> None:
        host = serving_host(config)
        self.server = EngineServer(config, index, Path(run_dir), gpus, host=host, node_rank=node_rank)

    def meeting(self) -> str:
        """`host:port` of this node that nobody uses."""
        return f"{self.server.host}:{free_port(self.server.host)}"

    def start(self, meeting: str = "") -> str:
        """Start the server, wait until it is healthy, return its URL."""
        self.server.start(meeting)
        return self.server.url

    def restart(self, meeting: str = "") -> str:
        """The same after an end; the log so far is kept."""
        self.server.restart(meeting)
        return self.server.url

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
        return ray.remote(_together).options(num_cpus=0).remote(self.actors, method)

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
            raise RuntimeError(f"Ray had no place for it within {limit_s:g} s; has a node been lost?") from error
        except (RayTaskError, RayActorError) as error:
            raise RuntimeError(str(root_cause(error))) from error


def _together(actors: list[Any], method: str) -> str:
    """Start the parts of one engine, each of which waits for the others; the URL of the first. The first failure ends
    it."""
    meeting = actors[0].meeting.remote()
    waiting = urls = [getattr(actor, method).remote(meeting) for actor in actors]
    while waiting:
        done, waiting = ray.wait(waiting)
        ray.get(done)
    return ray.get(urls[0])


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
