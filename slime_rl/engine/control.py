"""Control routes of one SGLang server: everything but generation, which goes through the router.

pause ─► begin_weight_update ─► update_from_tensor | update_from_distributed … ─► end_weight_update
      ─► flush_cache ─► set_weight_version ─► resume_generation
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import aiohttp

CONNECT_TRIES = 4
CONNECT_PAUSE_S = 0.2
DEFAULT_TIMEOUT_S = 300.0
WEIGHT_RECEIVER = "slime_rl.weight_sync.receive.load"  # a function that SGLang is allowed to import and call
MAX_RANKS = 65536  # of one engine; more is no answer
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class EngineError(RuntimeError):
    """An engine did not do what it was told: not reachable, too slow, or the request was refused."""


class EngineRefused(EngineError):
    """The engine answered, and its answer was no."""


class EngineControl:
    """HTTP client of one engine, bound to the event loop that first uses it.

    Refusals (4xx, 5xx) raise at once with the engine's answer. Only a connection that could not be made is tried
    again, `CONNECT_TRIES` times: anything later may have had its effect already.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        released: set[str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.released = set() if released is None else released  # tags of the memory that it has given back
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._num_ranks: int | None = None  # as it said last

    async def __aenter__(self) -> EngineControl:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def is_healthy(self, timeout_s: float, *, generate: bool = False) -> bool:
        """Whether it answers in time; with `generate` it must also produce a token, which a paused engine cannot."""
        try:
            await self.call("GET", "/health_generate" if generate else "/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def num_ranks(self, *, anew: bool = False) -> int:
        """How many ranks of it get weights: its tensor-parallel size. Asked once, or `anew`: another server may run
        at an URL by then.

        Raises:
            EngineRefused: it does not tell, or has pipeline stages or replicas, too, which no weight update reaches.
        """
        if self._num_ranks is None or anew:
            told = await self.call("GET", "/server_info")
            size = told.get("tp_size") if isinstance(told, dict) else None
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_RANKS:
                raise EngineRefused(f"engine {self.url}/server_info must tell its tp_size, got {size!r}")
            if (stages := told.get("pp_size") or 1) != 1:
                raise EngineRefused(f"engine {self.url} must have pp-size 1 to get weights, got {stages!r}")
            if (replicas := told.get("dp_size") or 1) != 1 and not told.get("enable_dp_attention"):
                raise EngineRefused(f"engine {self.url} must have dp-size 1 to get weights, got {replicas!r}")
            self._num_ranks = size
        return self._num_ranks

    async def pause(self, mode: Literal["retract", "in_place", "abort"]) -> None:
        """Stop generating. New requests wait; those in flight go back to the queue, keep their place, or end."""
        await self.call("POST", "/pause_generation", {"mode": mode})

    async def resume_generation(self) -> None:
        await self.call("POST", "/continue_generation", {})

    async def abort(self, request_id: str | None = None) -> None:
        """End one request by its rid, or all of them; they are answered with what they have."""
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self.call("POST", "/abort_request", body)

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Empty the prefix cache. Raises EngineError when requests still run after `wait_s`."""
        await self.call("POST", f"/flush_cache?timeout={wait_s:g}")

    async def begin_weight_update(self) -> None:
        """Open an update. One that its sender left open when it died is ended first: what it loaded is replaced now."""
        try:
            await self.call("POST", "/begin_weight_update", {})
        except EngineRefused as error:
            if "already open" not in str(error):
                raise
            await self.end_weight_update()
            await self.call("POST", "/begin_weight_update", {})

    async def update_from_tensor(self, payloads: list[str]) -> None:
        """Load one flattened bucket; `payloads` has one base64 text for each tensor-parallel rank."""
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
        await self.call("POST", "/update_weights_from_tensor", body)

    async def update_by_instruction(self, payload: str) -> None:
        """Have our receiver in every rank of the engine load weights; `payload` is that of an `Instruction`."""
        payloads = [payload] * await self.num_ranks()
        body = {"serialized_named_tensors": payloads, "load_format": WEIGHT_RECEIVER, "flush_cache": False}
        await self.call("POST", "/update_weights_from_tensor", body)

    async def update_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], *, group: str
    ) -> None:
        """Receive one flattened bucket by broadcast from rank 0 of `group`."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self.call("POST", "/update_weights_from_distributed", body)

    async def end_weight_update(self) -> None:
        await self.call("POST", "/end_weight_update", {})

    async def join_update_group(
        self, address: str, port: int, *, rank: int, world_size: int, group: str, backend: str
    ) -> None:
        """Join the process group that broadcasts weights; this engine's first rank becomes `rank`."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self.call("POST", "/init_weights_update_group", body)

    async def leave_update_group(self, group: str) -> None:
        await self.call("POST", "/destroy_weights_update_group", {"group_name": group})

    async def weight_version(self) -> str:
        """The version that the engine gives to the tokens it samples."""
        return str((await self.call("GET", "/model_info"))["weight_version"])

    async def set_weight_version(self, version: str) -> None:
        """Name the present weights; requests in flight keep the old name for the tokens they have."""
        await self.call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def checksum(self) -> str:
        """Fingerprint of the engine's weights; equal on engines with equal weights and tensor-parallel size."""
        answer = await self.call("POST", "/weights_checker", {"action": "checksum"})
        if not isinstance(answer, dict) or not answer.get("per_engine_checksum"):
            raise EngineRefused(f"engine {self.url}/weights_checker must tell a checksum, got {str(answer)[:200]!r}")
        return str(answer["per_engine_checksum"])

    async def release_memory(self, tags: tuple[str, ...] = MEMORY_TAGS) -> None:
        """Give back device memory. The engine must be idle, or paused by retract.

        A release while requests run, or of what is released already, ends the engine, so both are refused here.

        Raises:
            ValueError: a tag is unknown or released already.
            EngineError: requests are running.
        """
        self._check_tags(tags, released=False)
        await self.flush_cache()  # fails unless idle
        await self.call("POST", "/release_memory_occupation", {"tags": list(tags)})
        self.released |= set(tags)

    async def resume_memory(self, tags: tuple[str, ...] = MEMORY_TAGS) -> None:
        """Take released memory again; weights come back unset on CUDA and must be sent.

        Raises:
            ValueError: a tag is unknown or not released (which would end the engine).
        """
        self._check_tags(tags, released=True)
        await self.call("POST", "/resume_memory_occupation", {"tags": list(tags)})
        self.released -= set(tags)

    def _check_tags(self, tags: tuple[str, ...], released: bool) -> None:
        for tag in tags:
            if tag not in MEMORY_TAGS:
                raise ValueError(f"memory tag must be one of {', '.join(MEMORY_TAGS)}, got {tag!r}")
            if (tag in self.released) != released:
                raise ValueError(f"engine {self.url}: memory {tag!r} is {'not' if released else 'already'} released")

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """One request; the decoded answer, or None when it is not JSON.

        Raises:
            EngineError: refused, not reachable, damaged JSON, or no answer within `timeout_s`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._call(method, path, body)
        except TimeoutError:
            raise EngineError(f"engine {self.url}{path}: no answer within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__}: {error}") from error

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), headers=self._headers)
        tries = 0
        while True:
            tries += 1
            try:
                async with self._session.request(method, self.url + path, json=body) as answer:
                    if answer.status >= 400:
                        text = (await answer.text())[:1000]
                        raise EngineRefused(f"engine {self.url}{path} refused: HTTP {answer.status}: {text}")
                    is_json = answer.content_type == "application/json"
                    return await answer.json() if is_json else None
            except aiohttp.ClientConnectorError:
                if tries == CONNECT_TRIES:
                    raise
                await asyncio.sleep(CONNECT_PAUSE_S * 2 ** (tries - 1))
