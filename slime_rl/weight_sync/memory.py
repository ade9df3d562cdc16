"""What engines give back while the trainer has the devices (--colocate), and how they take it again.

    generate ──► pause, release ──► trainer works ──► resume weights ──► weight update ──► resume the rest ──► generate

On CUDA SGLang's memory saver gives weights and KV cache back. On CPU SGLang answers such requests with success and
gives back nothing; there our receiver frees the memory of the weights, and the KV cache stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from slime_rl.engine.control import EngineControl, EngineError
from slime_rl.weight_sync.instructions import Instruction

TIMEOUT_S = 120.0
TAGS = ("kv_cache", "weights")
Action = Literal["release", "resume_weights", "resume_rest"]


class EngineMemory:
    """Changes the memory of engines. `released` says what each (by URL) has given back; what was given back once must
    not be asked for again, since that ends an engine. `failed` holds those that did not do it: they must be replaced.
    """

    def __init__(
        self,
        *,
        on_cuda: bool,
        released: dict[str, set[str]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.on_cuda, self.released, self.headers = on_cuda, released, headers
        self.failed: dict[str, str] = {}

    def change(self, action: Action, urls: list[str]) -> None:
        """Do it on all of them at once."""
        actions: dict[str, Callable[[EngineControl], Coroutine[Any, Any, None]]] = {
            "release": self._release,
            "resume_weights": lambda engine: self._resume(engine, "weights"),
            "resume_rest": lambda engine: self._resume(engine, "kv_cache"),
        }

        async def one(url: str) -> None:
            tags = self.released.setdefault(url, set())
            async with EngineControl(url, TIMEOUT_S, released=tags, headers=self.headers) as engine:
                try:
                    await actions[action](engine)
                except EngineError as error:
                    self.failed[url] = str(error)

        async def every() -> None:
            await asyncio.gather(*map(one, urls))

        asyncio.run(every())
        self.released = {url: tags for url, tags in self.released.items() if tags and url not in self.failed}

    async def _release(self, engine: EngineControl) -> None:
        if engine.released:
            return
        await engine.pause("retract")
        if self.on_cuda:
            await engine.release_memory(TAGS)
            return
        await engine.flush_cache()
        await engine.begin_weight_update()  # stays open until the weights are back, since its end looks at them
        await self._instruct(engine, "release")
        engine.released.add("weights")

    async def _resume(self, engine: EngineControl, tag: str) -> None:
        if tag not in engine.released:
            return
        if self.on_cuda:
            await engine.resume_memory((tag,))
            return
        await self._instruct(engine, "resume")
        await engine.end_weight_update()
        engine.released.discard(tag)

    async def _instruct(self, engine: EngineControl, kind: Literal["release", "resume"]) -> None:
        await engine.update_by_instruction(Instruction(kind=kind).to_payload())
