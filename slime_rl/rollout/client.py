"""Asks the router for tokens and brings back ids, log-probs and weight versions of exactly those tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from slime_rl.rollout.versions import token_versions


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One answer of an engine. n = generated tokens."""

    tokens: list[int]  # [n] as sampled, an end token included
    log_probs: list[float]  # [n] after temperature
    versions: list[int]  # [n] weight version that sampled each
    text: str
    finish_reason: str  # stop, length or abort
    num_cached_tokens: int


class EngineClient:
    """HTTP client of the router (or of one engine).

    A 4xx answer is our mistake and fails at once. Connection errors and 5xx are retried with growing pauses until
    `timeout_s` has passed; the router may answer the retry from another engine.
    """

    def __init__(self, url: str, *, max_in_flight: int, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.num_retries = 0
        self._slots = asyncio.Semaphore(max_in_flight)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Generation:
        """Sample a continuation of `input_ids [P]`.

        Raises:
            ValueError: the engine refused the request (4xx) or its answer does not fit together.
            TimeoutError: no answer within `timeout_s`, retries included; names the last failure.
        """
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
            "stream": False,
        }
        async with self._slots:
            return _generation(await self._post("/generate", body))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        deadline, pause, last = time.monotonic() + self.timeout_s, 0.1, "no attempt was made"
        while (left := deadline - time.monotonic()) > 0:
            try:
                timeout = aiohttp.ClientTimeout(total=left)
                async with self._session.post(self.url + path, json=body, timeout=timeout) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    last = f"HTTP {answer.status}: {(await answer.text())[:500]}"
                    if 400 <= answer.status < 500 and answer.status not in (408, 429):
                        raise ValueError(f"{self.url}{path} refused the request: {last}")
            except (aiohttp.ClientError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}"
            self.num_retries += 1
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 2, 5.0)
        raise TimeoutError(
            f"{self.url}{path} gave no answer within --request-timeout-s {self.timeout_s:g}; last: {last}"
        )


def _generation(answer: dict[str, Any]) -> Generation:
    meta = answer["meta_info"]
    tokens = answer["output_ids"]
    log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    if len(log_probs) != len(tokens):
        raise ValueError(
            f"engine answered {len(tokens)} tokens but {len(log_probs)} log-probs; its meta_info has {sorted(meta)}"
        )
    reason = meta.get("finish_reason") or {}
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        versions=token_versions(meta, len(tokens)),
        text=answer.get("text", ""),
        finish_reason=reason.get("type", "abort") if isinstance(reason, dict) else str(reason),
        num_cached_tokens=meta.get("cached_tokens", 0),
    )
