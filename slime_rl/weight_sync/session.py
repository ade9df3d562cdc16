"""All engines of a run, told to do the same thing at the same time, and the order of one weight update.

    pause ─► begin, version "N-incomplete" ─► buckets ─► end ─► flush ─► version "N" ─► check it ─► resume

The engines are driven from a thread with an event loop of its own, so that the caller can prepare the next bucket while
one is on its way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

from slime_rl.engine.control import EngineControl

Action = Callable[[EngineControl, int], Coroutine[Any, Any, Any]]


class EngineSession:
    """Control of several engines. `start` begins an action on each of them and returns; `run` waits for all.

    When an action fails on one engine the others' are left to end, then the first failure is raised.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        if not urls:
            raise ValueError("weight sync needs the URL of at least one engine")
        self.controls = [EngineControl(url, timeout_s) for url in urls]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-session", daemon=True)
        self._thread.start()

    def start(self, action: Action) -> Future[list[Any]]:
        """Begin `action(control, engine index)` on every engine; the future holds their results in order."""
        return asyncio.run_coroutine_threadsafe(self._gather(action), self._loop)

    def run(self, action: Action) -> list[Any]:
        """`start` and wait. Raises what an engine's action raised."""
        return self.start(action).result()

    async def _gather(self, action: Action) -> list[Any]:
        results = await asyncio.gather(
            *(action(control, index) for index, control in enumerate(self.controls)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    @contextmanager
    def update(self, version: int, mode: Literal["retract", "in_place"]) -> Iterator[None]:
        """One weight update; the body sends the buckets.

        An engine whose update breaks off keeps a version that is no number, so that whoever looks sees that its weights
        are mixed. After a failure the engines stay paused: they sample nothing from such weights.

        Raises:
            EngineError: an engine refused, did not answer, or reports another version afterwards.
        """
        self.run(lambda engine, _: engine.pause(mode))
        self.run(lambda engine, _: engine.begin_weight_update())
        self.run(lambda engine, _: engine.set_weight_version(f"{version}-incomplete"))
        yield
        self.run(lambda engine, _: engine.end_weight_update())
        if mode == "retract":  # in_place: requests hold their cache, and engines run without a prefix cache
            self.run(lambda engine, _: engine.flush_cache())
        self.run(lambda engine, _: engine.set_weight_version(str(version)))
        self._check_version(version)
        self.run(lambda engine, _: engine.resume_generation())

    def _check_version(self, version: int) -> None:
        reported = self.run(lambda engine, _: engine.weight_version())
        wrong = {c.url: r for c, r in zip(self.controls, reported, strict=True) if r != str(version)}
        if wrong:
            raise RuntimeError(f"weight update to version {version}: engines report other versions: {wrong}")

    def close(self) -> None:
        """Close connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self.run(lambda engine, _: engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
