"""Asks the router for tokens and brings back ids, log-probs and weight versions of exactly those tokens."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from slime_rl.observability.trace import NO_TRACE, Trace
from slime_rl.rollout.scope import SampleScope, current_scope
from slime_rl.rollout.slots import Slots
from slime_rl.rollout.versions import token_versions
from slime_rl.types import all_finite

ABORT_TIMEOUT_S = 5.0  # an engine that takes longer to hear of an abort is gone; its requests end with the connection
_JSON = {"Content-Type": "application/json"}
ROUTING_HEADER = "X-SMG-Routing-Key"  # what sglang-router's policy "manual" goes by
WORKERS_AGE_S = 5.0  # an engine that joined later has none of the requests to abort yet
# How SGLang refuses an id that it still works on: after a broken connection the router sends the same request again.
STILL_KNOWN = "Duplicate request ID"
# How sglang-router, where several models share it, refuses a request while it has no engine at all: it is a new one.
# "No router available for this request", and for chat completions "Model 'NAME' not found or no router available".
_NO_ENGINE_YET = "no router available"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One answer of an engine. n = generated tokens."""

    tokens: list[int]  # [n] as sampled, an end token included
    log_probs: list[float]  # [n] after temperature
    versions: list[int]  # [n] weight version that sampled each
    text: str
    finish_reason: str  # stop, length or abort
    num_cached_tokens: int


class RequestRefused(ValueError):
    """An engine will not answer this request (4xx), such as one that is longer than its context."""


NOTHING = Generation(tokens=[], log_probs=[], versions=[], text="", finish_reason="abort", num_cached_tokens=0)


class EngineClient:
    """HTTP client of the router (or of one engine). `model` is which one is asked for, where the router serves several.

    A 4xx answer is our mistake and fails at once. Connection errors and 5xx are retried with growing pauses until
    `timeout_s` has passed; the router may answer the retry from another engine.
    """

    def __init__(
        self,
        url: str,
        *,
        max_in_flight: int,
        timeout_s: float,
        trace: Trace = NO_TRACE,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        self._model = {} if model is None else {"model": model}
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._trace = trace
        self.num_retries = 0
        self.num_prompt_tokens, self.num_cached_tokens = 0, 0  # of all answered requests
        self._slots = Slots(max_in_flight)
        self._workers: tuple[float, list[str]] = (-math.inf, [])  # when they were asked for, the engines' URLs
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),  # engines set none, and looking for them takes time
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, routing_key: str | None = None
    ) -> Generation:
        """Sample a continuation of `input_ids [P]`.

        Requests with the same `routing_key` go to the same engine with --router-policy manual.

        Raises:
            RequestRefused: the engine refused the request (4xx).
            ValueError: its answer does not fit together.
            TimeoutError: no answer within `timeout_s`, retries included; names the last failure.
        """
        scope, now = current_scope(), asyncio.get_running_loop().time
        came_at = now()
        if scope is None:
            async with self._slots:
                return await self._generate(SampleScope(), input_ids, sampling_params, routing_key)
        async with AsyncExitStack() as held:
            scope.queued += 1
            try:
                await held.enter_async_context(self._slots)
            finally:
                scope.queued -= 1  # also when its caller gives up: whoever counts would wait for ever
            if scope.interrupted:
                scope.was_cut = True
                return NOTHING
            if scope.has_sent:
                scope.queued_s += now() - came_at
            else:
                scope.has_sent, scope.started_at = True, now()
            answer = await self._generate(scope, input_ids, sampling_params, routing_key)
            scope.was_cut = answer.finish_reason == "abort"
            scope.num_sampled += len(answer.tokens)
            return answer

    async def _generate(
        self, scope: SampleScope, input_ids: list[int], sampling_params: dict[str, Any], routing_key: str | None
    ) -> Generation:
        """`scope.requests` holds the id of the request while an engine has it."""
        body = {
            **self._model,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
            "stream": False,
        }
        headers = {} if routing_key is None else {ROUTING_HEADER: routing_key}
        with self._trace.span("requests", "request", prompt_tokens=len(input_ids)) as details:
            content = await self._post("/generate", body, headers, scope)
            answer = NOTHING if content is None else _generation(content)
            details |= {"tokens": len(answer.tokens), "versions": answer.versions[-1:], "end": answer.finish_reason}
        self.num_prompt_tokens += len(input_ids)
        self.num_cached_tokens += answer.num_cached_tokens
        return answer

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Have the engines end these requests, each of which is then answered with what it has.

        The router does not say which engine has a request, so every engine is told. One that does not listen is
        passed over: whoever interrupts also bounds the wait.
        """
        bodies = [{"rid": request_id} for request_id in request_ids]
        if bodies:
            workers = await self._worker_urls()
            await asyncio.gather(*(self._tell(url + "/abort_request", body) for url in workers for body in bodies))

    async def _worker_urls(self) -> list[str]:
        """The engines behind the router; ourselves where we talk to a single engine."""
        asked_at, urls = self._workers
        now = time.monotonic()
        if now - asked_at > WORKERS_AGE_S:
            urls = [self.url]
            try:
                timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
                async with self._session.get(self.url + "/workers", timeout=timeout) as answer:
                    if answer.status == 200:
                        urls = [worker["url"].rstrip("/") for worker in (await answer.json())["workers"]]
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
                return urls  # no answer, or one of another form; asked again next time
            self._workers = (now, urls)
        return urls

    async def _tell(self, url: str, body: dict[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(url, json=body, timeout=timeout) as answer:
                await answer.read()

    async def _post(
        self, path: str, body: dict[str, Any], more_headers: dict[str, str], scope: SampleScope
    ) -> dict[str, Any] | None:
        """None when it failed after an interruption: prefill and decode engines answer an abort with HTTP 500."""
        headers = {**_JSON, **more_headers}
        deadline, pause, last = time.monotonic() + self.timeout_s, 0.1, "no attempt was made"
        while (left := deadline - time.monotonic()) > 0:
            request_id = uuid.uuid4().hex  # each time anew: an engine may still have the one whose connection broke
            data = orjson.dumps({"rid": request_id, **body})
            scope.requests.add(request_id)
            try:
                timeout = aiohttp.ClientTimeout(total=left)
                async with self._session.post(self.url + path, data=data, headers=headers, timeout=timeout) as answer:
                    if answer.status == 200:
                        return _json(self.url + path, await answer.read())
                    last = f"HTTP {answer.status}: {(await answer.text(errors='replace'))[:500]}"
                    is_ours = 400 <= answer.status < 500 and answer.status not in (408, 429)
                    if is_ours and STILL_KNOWN not in last and not has_no_engine_yet(last):
                        raise RequestRefused(f"{self.url}{path} refused the request: {last}")
            except (aiohttp.ClientError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}"
            finally:
                scope.requests.discard(request_id)
            if scope.interrupted:
                return None
            self.num_retries += 1
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            if scope.interrupted:
                return None
            pause = min(pause * 2, 5.0)
        raise TimeoutError(
            f"{self.url}{path} gave no answer within --request-timeout-s {self.timeout_s:g}; last: {last}"
        )


def has_no_engine_yet(refusal: str) -> bool:
    """Whether the router refused a request for being new, which another attempt may find changed."""
    return _NO_ENGINE_YET in refusal.lower()


def _json(url: str, content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{url} answered no JSON ({error}): {content[:300]!r}") from error


def _generation(answer: Any) -> Generation:
    try:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        text, num_cached_tokens = answer.get("text") or "", meta.get("cached_tokens") or 0
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"the engine answered something else than a generation: {str(answer)[:300]}") from error
    reason = meta.get("finish_reason") or {}
    kind = reason.get("type", "abort") if isinstance(reason, dict) else str(reason)
    if kind == "abort" and not log_probs:
        return NOTHING  # ended while it waited for its turn
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens) or not isinstance(text, str):
        raise ValueError(f"the engine answered tokens that are no list of numbers, or no text: {str(answer)[:300]}")
    if len(log_probs) != len(tokens):
        raise ValueError(
            f"engine answered {len(tokens)} tokens but {len(log_probs)} log-probs; its meta_info has {sorted(meta)}"
        )
    if not all_finite(log_probs):  # what is no number in JSON arrives as null
        raise ValueError(
            "engine answered a log-prob that is no finite number, so its weights or its arithmetic are broken: "
            f"token {next(i for i, x in enumerate(log_probs) if not all_finite([x]))} of {len(log_probs)}"
        )
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        versions=token_versions(meta, len(tokens)),
        text=text,
        finish_reason=kind,
        num_cached_tokens=num_cached_tokens,
    )
