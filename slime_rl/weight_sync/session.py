"""All engines of a run, told to do the same thing at the same time, and the order of one weight update.

    pause ─► begin, version "N-incomplete" ─► buckets ─► end ─► flush, version "N" ─► check it ─► resume

The engines are driven from a thread with an event loop of its own, so that the caller can prepare the next bucket while
one is on its way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from slime_rl.engine.control import EngineControl, EngineError

T = TypeVar("T")
Action = Callable[[EngineControl, int], Coroutine[Any, Any, Any]]


class EngineSession:
    """Control of several engines. `start` begins an action on each of them and returns; `run` waits for all.

    An engine on which an action fails is left out from then on, and `failed` tells why: the others go on. When it fails
    on the last ones, that failure is raised. `external`: somebody else may start another server at an engine's URL.
    """

    def __init__(
        self, urls: Sequence[str], timeout_s: float, headers: Mapping[str, str] | None = None, *, external: bool = False
    ) -> None:
        self.timeout_s, self.headers, self.external = timeout_s, headers, external
        self.controls: list[EngineControl] = []
        self.failed: dict[str, EngineError] = {}
        self._known: dict[str, EngineControl] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-session", daemon=True)
        self._thread.start()
        self.connect(urls)

    def connect(self, urls: Sequence[str]) -> None:
        """Speak to these engines from now on; those that failed before count as whole again."""
        if not urls:
            raise ValueError("weight sync needs the URL of at least one engine")
        gone = [self._known.pop(url) for url in list(self._known) if url not in urls]
        if gone:
            asyncio.run_coroutine_threadsafe(_close_all(gone), self._loop).result()
        self._known |= {
            url: EngineControl(url, self.timeout_s, headers=self.headers) for url in urls if url not in self._known
        }
        self.controls, self.failed = [self._known[url] for url in urls], {}

    def start(self, action: Action) -> Future[list[Any]]:
        """Begin `action(control, its index)` on every engine; the future holds the results of those that did it."""
        return asyncio.run_coroutine_threadsafe(self._gather(action, list(self.controls)), self._loop)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something of the caller's own in the thread of the engines, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def run(self, action: Action) -> list[Any]:
        """`start` and wait. Raises what an engine's action raised."""
        return self.start(action).result()

    def num_ranks(self) -> list[int]:
        """Of each engine: they may differ."""
        return self.run(lambda engine, _: engine.num_ranks())

    async def _gather(self, action: Action, controls: list[EngineControl]) -> list[Any]:
        results = await asyncio.gather(
            *(action(control, index) for index, control in enumerate(controls)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result
        bad = {c.url: r for c, r in zip(controls, results, strict=True) if isinstance(r, EngineError)}
        self.controls = [control for control in self.controls if control.url not in bad]
        self.failed |= bad
        if bad and not self.controls:
            raise next(iter(bad.values()))
        return [result for result in results if not isinstance(result, EngineError)]

    @contextmanager
    def update(self, version: int, mode: Literal["retract", "in_place"]) -> Iterator[Future[Any]]:
        """One weight update; the body sends the buckets, from when the future that it is given is done.

        An engine whose update breaks off keeps a version that is no number, so that whoever looks sees that its weights
        are mixed. After a failure the engines stay paused: they sample nothing from such weights.

        Raises:
            EngineError: no engine is left that did its part.
            RuntimeError: an engine reports another version afterwards.
        """

        async def begin(engine: EngineControl, _: int) -> None:
            await engine.num_ranks(anew=self.external)  # one that is refused goes on as it was
            await engine.pause(mode)
            await asyncio.gather(engine.begin_weight_update(), engine.set_weight_version(f"{version}-incomplete"))

        async def end(engine: EngineControl, _: int) -> str:
            await engine.end_weight_update()
            # in_place: requests hold their cache, and engines run without a prefix cache
            flushed = [engine.flush_cache()] if mode == "retract" else []
            await asyncio.gather(*flushed, engine.set_weight_version(str(version)))
            return await engine.weight_version()

        yield self.start(begin)
        self._check_version(version, self.run(end))
        self.run(lambda engine, _: engine.resume_generation())

    def _check_version(self, version: int, reported: list[str]) -> None:
        wrong = {c.url: r for c, r in zip(self.controls, reported, strict=True) if r != str(version)}
        if wrong:
            raise RuntimeError(f"weight update to version {version}: engines report other versions: {wrong}")

    def close(self) -> None:
        """Close connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_close_all(list(self._known.values())), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _close_all(controls: Sequence[EngineControl]) -> None:
    for control in controls:
        await control.close()
