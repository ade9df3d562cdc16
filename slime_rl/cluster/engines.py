"""The rollout side's processes: one Ray actor per SGLang server, the router that the driver owns, and their guard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_rl.cluster.errors import root_cause
from slime_rl.cluster.placement import Placement
from slime_rl.config import Config
from slime_rl.engine.control import EngineControl, EngineError
from slime_rl.engine.guard import EngineGuard, EngineState
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer, answers

_ACTOR_ANSWER_S = 10.0
_RESTART_MARGIN_S = 30.0  # what ending the old server may take on top of the new one's start
_CHECKSUM_S = 120.0


class EngineActor:
    """Runs in its own Ray worker; the server below it lives in a process group that dies with this worker."""

    def __init__(self, config: Config, index: int, run_dir: str, gpus: tuple[int, ...]) -> None:
        self.server = EngineServer(config, index, Path(run_dir), gpus, host=serving_host(config))

    def start(self) -> str:
        """Start the server, wait until it is healthy, return its URL."""
        self.server.start()
        return self.server.url

    def restart(self) -> str:
        self.server.restart()
        return self.server.url

    def end_message(self) -> str | None:
        return self.server.end_message()

    def stop(self) -> None:
        self.server.stop()


class EngineHandle:
    """The driver's side of one engine; a lost Ray worker is replaced by another in the same bundle."""

    def __init__(
        self, config: Config, placement: Placement, index: int, options: dict[str, Any], gpus: tuple[int, ...]
    ) -> None:
        self.config, self.placement, self.index, self.options, self.gpus = config, placement, index, options, gpus
        self.actor = self._make(gpus)

    def _make(self, gpus: tuple[int, ...]) -> Any:
        run_dir = str(self.config.run_dir)
        return ray.remote(EngineActor).options(**self.options).remote(self.config, self.index, run_dir, gpus)

    def begin(self) -> Any:
        """Start the server; the reference resolves to its URL."""
        return self.actor.start.remote()

    def stop(self) -> list[Any]:
        """Begin to end the server; references to wait for."""
        return [self.actor.stop.remote()]

    def end_message(self) -> str | None:
        """See engine.guard.Restartable. A worker that does not answer says nothing about its server."""
        try:
            return ray.get(self.actor.end_message.remote(), timeout=_ACTOR_ANSWER_S)
        except GetTimeoutError:
            return None
        except RayActorError:
            return "was lost with its Ray worker"

    def weight_version(self) -> int | None:
        """See engine.guard.Restartable; nobody else restarts it."""
        return None

    def restart(self) -> str:
        """See engine.guard.Restartable."""
        limit_s = self.config.cluster.start_timeout_s + _RESTART_MARGIN_S
        try:
            return ray.get(self.actor.restart.remote(), timeout=limit_s)
        except RayTaskError as error:
            raise RuntimeError(str(root_cause(error))) from error
        except (GetTimeoutError, RayActorError):
            ray.kill(self.actor)  # its server ends with it
        self.actor = self._make(self.placement.present_gpus([(self.options, self.gpus)])[0])
        try:
            return ray.get(self.actor.start.remote(), timeout=limit_s)
        except GetTimeoutError as error:  # most likely Ray waits for a node in place of a lost one
            raise RuntimeError(f"Ray had no place for it within {limit_s:g} s; has a node been lost?") from error
        except (RayTaskError, RayActorError) as error:
            raise RuntimeError(str(root_cause(error))) from error


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


class EngineGroup:
    """All engines of one model and the router in front of them. `beside` is the name of a model that is not the policy:
    it keeps its weights."""

    def __init__(
        self, config: Config, handles: Sequence[EngineHandle | ExternalEngine], beside: str | None = None
    ) -> None:
        name, label = ("router", "") if beside is None else (f"router_{beside}", f"{beside}: ")
        self.router = RouterProcess(config, config.run_dir, host=serving_host(config), name=name)
        self.guard = EngineGuard(config, self.router, keeps_weights=beside is not None, label=label)
        self.headers = config.engine.authorization
        self.handles = handles

    def start(self) -> list[Any]:
        """Begin starting; the returned references resolve to the engines' URLs."""
        self.router.start()
        return [handle.begin() for handle in self.handles]

    def connect(self, urls: list[str]) -> None:
        """Put the started engines behind the router and watch them."""
        self.guard.begin(list(zip(self.handles, urls, strict=True)))

    def updatable(self) -> list[str]:
        """URLs of the engines that can take new weights."""
        return self.guard.urls(EngineState.SERVING, EngineState.STALE, EngineState.SLOW)

    def settle(self, version: int, updated: list[str], failed: dict[str, str]) -> None:
        """After a weight update: replace the engines that failed in it, and give traffic to the stale ones that now
        have the same weights as an engine that was never lost."""
        for url, reason in failed.items():
            self.guard.report(url, f"failed in the weight update to version {version}: {reason}")
        stale = [url for url in self.guard.urls(EngineState.STALE) if url in updated]
        if not stale:
            return
        sound = [url for url in self.guard.urls(EngineState.SERVING) if url in updated]
        found = asyncio.run(_fingerprints([*sound[:1], *stale], self.headers))
        expected = next((found[url] for url in sound[:1] if isinstance(found[url], tuple)), None)
        for url in stale:
            print_ = found[url]
            if isinstance(print_, EngineError):
                self.guard.report(url, f"does not tell its checksum: {print_}")
            elif print_[0] != str(version) or (expected is not None and print_ != expected):
                self.guard.report(url, f"has version and checksum {print_} where {expected or version} is expected")
            else:
                self.guard.admit(url)

    def stop(self) -> None:
        self.guard.close()
        if ends := [end for handle in self.handles for end in handle.stop()]:
            ray.wait(ends, num_returns=len(ends), timeout=20)
        self.router.stop()


def policy_engines(config: Config, placement: Placement) -> EngineGroup:
    """The engines that generate, with the arguments of their groups."""
    external = config.cluster.rollout_external_engine_addrs
    if external:
        return EngineGroup(config, [ExternalEngine(config, url) for url in external])
    policy = config.served_models[0]
    own = [config.for_engine(policy, group) for group in policy.groups for _ in range(group.num_engines)]
    handles = [
        EngineHandle(engine, placement, index, placement.engine_options(index), placement.engine_gpus(index))
        for index, engine in enumerate(own)
    ]
    return EngineGroup(config, handles)


def other_engines(config: Config, placement: Placement) -> dict[str, EngineGroup]:
    """The models of --sglang-config beside the policy, by name; their engines are numbered after the policy's."""
    found: dict[str, EngineGroup] = {}
    policy, *others = config.served_models
    index = policy.num_engines
    for model in others:
        handles = []
        for group in model.groups:
            engine = config.for_engine(model, group)
            for options, gpus in placement.reserve_engines(group.num_engines, group.num_gpus_per_engine):
                handles.append(EngineHandle(engine, placement, index, options, gpus))
                index += 1
        found[model.name] = EngineGroup(config, handles, model.name)
    return found


async def _fingerprints(urls: list[str], headers: dict[str, str]) -> dict[str, tuple[str, str] | EngineError]:
    """(weight version, checksum of the weights) of each engine, or why it does not tell them."""

    async def one(url: str) -> tuple[str, str] | EngineError:
        async with EngineControl(url, _CHECKSUM_S, headers=headers) as control:
            try:
                return await control.weight_version(), await control.checksum()
            except EngineError as error:
                return error

    return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))
