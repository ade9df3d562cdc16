"""The rollout side's processes: the engines of each model, the router that the driver owns, and their guard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray

from slime_rl.cluster.engine_handle import EngineHandle, ExternalEngine, serving_host
from slime_rl.cluster.placement import Placement
from slime_rl.config import Config
from slime_rl.config.served_models import POLICY
from slime_rl.engine.control import EngineControl, EngineError
from slime_rl.engine.guard import EngineGuard, EngineState
from slime_rl.engine.router import ModelRouter, RouterProcess

_SIZE_S, _CHECKSUM_S = 10.0, 120.0
_ABORT_S = 10.0

T = TypeVar("T")


class EngineGroup:
    """All engines of one model and the router in front of them, which is that of `lead` with --share-router. A model
    beside the policy keeps its weights. `disaggregated`: some of the engines prefill, the others decode."""

    def __init__(
        self,
        config: Config,
        handles: Sequence[EngineHandle | ExternalEngine],
        model: str = POLICY,
        *,
        is_policy: bool = True,
        disaggregated: bool = False,
        lead: EngineGroup | None = None,
    ) -> None:
        name, label = ("router", "") if is_policy else (f"router_{model}", f"{model}: ")
        shared, host = config.router.share_router, serving_host(config)
        self.lead, self.handles, self.headers = lead, handles, config.engine.authorization
        self.router = (
            lead.router
            if lead is not None
            else RouterProcess(config, config.run_dir, host=host, name=name, disaggregated=disaggregated, shared=shared)
        )
        self.guard = EngineGuard(
            config,
            ModelRouter(self.router, model) if shared else self.router,
            keeps_weights=not is_policy,
            label=label,
            on_loss=self._abort_all if disaggregated else None,
            lead=None if lead is None else lead.guard,
        )

    def start(self) -> list[Any]:
        """Begin starting; the returned references resolve to the engines' URLs."""
        begun = [handle.begin() for handle in self.handles]  # first: they take longest, and the router is waited for
        if self.lead is None:
            self.router.start()
        return begun

    def connect(self, urls: list[str]) -> None:
        """Put the started engines behind the router and watch them."""
        self.guard.begin(list(zip(self.handles, urls, strict=True)))

    def updatable(self) -> list[str]:
        """URLs of the engines that can take new weights."""
        return self.guard.urls(EngineState.SERVING, EngineState.STALE, EngineState.SLOW)

    def settle(self, version: int, updated: list[str], failed: dict[str, str]) -> None:
        """After a weight update: replace the engines that failed in it, and give traffic to the stale ones that now
        have the same weights as an engine of their size that was never lost. Where none of those tells them their
        version counts: what they got was checked when they got it."""
        for url, reason in failed.items():
            self.guard.report(url, f"failed in the weight update to version {version}: {reason}")
        stale = [url for url in self.guard.urls(EngineState.STALE) if url in updated]
        if not stale:
            return
        sound = [url for url in self.guard.urls(EngineState.SERVING) if url in updated]
        found, wanted = asyncio.run(_fingerprints(stale, sound, self.headers))
        for url in stale:
            print_, expected = found[url], wanted[url]
            if isinstance(print_, EngineError):
                self.guard.report(url, f"does not tell its checksum: {print_}")
            elif print_[0] != str(version) or (expected and print_ not in expected):
                wants = " or ".join(map(str, sorted(expected))) or version
                self.guard.report(url, f"has version and checksum {print_} where {wants} is expected")
            else:
                self.guard.admit(url)

    def _abort_all(self, urls: list[str]) -> None:
        """A prefill engine would wait for a lost decode engine, and the other way round: let requests begin anew."""

        async def tell(url: str) -> None:
            async with EngineControl(url, _ABORT_S, headers=self.headers) as control:
                with contextlib.suppress(EngineError):  # it has failed itself
                    await control.abort()

        async def tell_all() -> None:
            await asyncio.gather(*map(tell, urls))

        asyncio.run(tell_all())

    def stop(self) -> None:
        self.guard.close()
        if ends := [end for handle in self.handles for end in handle.stop()]:
            ray.wait(ends, num_returns=len(ends), timeout=20)
        self.router.stop()

    def abandon(self) -> None:
        """Stop watching and routing; the engines are left to the end of the Ray session."""
        self.guard.close()
        self.router.stop()


def policy_engines(config: Config, placement: Placement) -> EngineGroup:
    """The engines that generate, with the arguments of their groups."""
    external = config.cluster.rollout_external_engine_addrs
    if external:
        return EngineGroup(config, [ExternalEngine(config, url) for url in external])
    policy = config.served_models[0]
    own = [config.for_engine(policy, group) for group in policy.groups for _ in range(group.num_engines)]
    handles = [
        EngineHandle(engine, placement, index, placement.engine_seats(index)) for index, engine in enumerate(own)
    ]
    return EngineGroup(config, handles, policy.name, disaggregated=policy.is_disaggregated)


def other_engines(config: Config, placement: Placement, lead: EngineGroup) -> dict[str, EngineGroup]:
    """The models of --sglang-config beside the policy, whose engines are `lead`, by name; theirs are numbered after
    those."""
    found: dict[str, EngineGroup] = {}
    policy, *others = config.served_models
    index = policy.num_engines
    for model in others:
        handles = []
        for group in model.groups:
            engine = config.for_engine(model, group)
            for seats in placement.reserve_engines(group.num_engines, engine.cluster):
                handles.append(EngineHandle(engine, placement, index, seats))
                index += 1
        found[model.name] = EngineGroup(
            config,
            handles,
            model.name,
            is_policy=False,
            disaggregated=model.is_disaggregated,
            lead=lead if config.router.share_router else None,
        )
    return found


Fingerprint = tuple[str, str]  # weight version, checksum of the weights


async def _fingerprints(
    stale: list[str], sound: list[str], headers: dict[str, str]
) -> tuple[dict[str, Fingerprint | EngineError], dict[str, set[Fingerprint]]]:
    """What each stale engine has, or why it does not tell; and by its URL what the sound ones of its size have, which
    may be cut in several ways. Each rank has a part of the weights, so that engines of other sizes differ."""

    async def ask(
        question: Callable[[EngineControl], Awaitable[T]], urls: list[str], limit_s: float
    ) -> dict[str, T | EngineError]:
        async def one(url: str) -> T | EngineError:
            async with EngineControl(url, limit_s, headers=headers) as control:
                try:
                    return await question(control)
                except EngineError as error:
                    return error

        return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))

    async def fingerprint(control: EngineControl) -> Fingerprint:
        return await control.weight_version(), await control.checksum()

    sizes = await ask(EngineControl.num_ranks, [*stale, *sound], _SIZE_S)
    alike = {url: [other for other in sound if sizes[other] == sizes[url]] for url in stale}
    models = dict.fromkeys(other for others in alike.values() for other in others)
    found = await ask(fingerprint, [*stale, *models], _CHECKSUM_S)
    told = {url: value for url, value in found.items() if not isinstance(value, EngineError)}
    wanted = {url: {told[other] for other in others if other in told} for url, others in alike.items()}
    unknown = {url: size for url in stale if isinstance(size := sizes[url], EngineError)}
    return {url: unknown.get(url, found[url]) for url in stale}, wanted
