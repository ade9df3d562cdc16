from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from scripted_engine import answer, scripted_engine

from slime_rl.rollout.client import ROUTING_HEADER, EngineClient
from slime_rl.rollout.scope import SampleScope, use_scope


@asynccontextmanager
async def client_of(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], **options: Any
) -> AsyncIterator[EngineClient]:
    """A client of a server that answers /generate with `handle`."""
    app = web.Application()
    app.router.add_post("/generate", handle)
    async with TestServer(app) as server:
        async with EngineClient(str(server.make_url("")), max_in_flight=1, timeout_s=60, **options) as client:
            yield client


def test_generate_returns_exactly_what_was_sampled() -> None:
    async def go() -> None:
        async with scripted_engine(lambda body: answer([7, 8, 2], "ab", version="3")) as (url, received):
            async with EngineClient(url, max_in_flight=4, timeout_s=60) as client:
                result = await client.generate([1, 2], {"max_new_tokens": 3})
        assert (result.tokens, result.log_probs, result.versions) == ([7, 8, 2], [-0.5] * 3, [3, 3, 3])
        assert (result.text, result.finish_reason) == ("ab", "stop")
        assert received[0]["input_ids"] == [1, 2] and received[0]["return_logprob"] is True

    asyncio.run(go())


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": None},
        {"output_ids": 5},
        {"output_ids": ["x"]},
        {"output_ids": [1.5]},
        {"text": 5},
        {"meta_info": None},
        {"meta_info": {"output_token_logprobs": [5]}},
    ],
)
def test_an_answer_of_another_form_is_an_error_that_shows_it(changes: dict[str, Any]) -> None:
    async def go() -> None:
        async with scripted_engine(lambda body: answer([5]) | changes) as (url, _):
            async with EngineClient(url, max_in_flight=4, timeout_s=60) as client:
                with pytest.raises(ValueError, match="the engine answered"):
                    await client.generate([1], {})

    asyncio.run(go())


def test_bad_request_fails_at_once() -> None:
    async def go() -> None:
        async with scripted_engine(lambda body: 400) as (url, received):
            async with EngineClient(url, max_in_flight=4, timeout_s=60) as client:
                with pytest.raises(ValueError, match="refused the request: HTTP 400: scripted failure"):
                    await client.generate([1], {})
        assert len(received) == 1

    asyncio.run(go())


def test_server_errors_are_retried_until_one_answer_comes() -> None:
    statuses = iter([503, 500])

    async def go() -> None:
        async with scripted_engine(lambda body: next(statuses, answer([5]))) as (url, received):
            async with EngineClient(url, max_in_flight=4, timeout_s=60) as client:
                result = await client.generate([1], {})
                assert client.num_retries == 2
        assert result.tokens == [5] and len(received) == 3

    asyncio.run(go())


@pytest.mark.parametrize(
    "refusal", ["No router available for this request", "Model 'policy' not found or no router available"]
)
def test_a_router_of_several_models_is_told_which_and_waited_for_while_it_has_no_engine(refusal: str) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((await request.json())["model"])
        if len(asked) == 1:  # what a new one says
            return web.Response(status=404, text=refusal)
        return web.json_response(answer([5], "a"))

    async def go() -> None:
        async with client_of(handle, model="policy") as client:
            assert (await client.generate([1], {})).tokens == [5]

    asyncio.run(go())
    assert asked == ["policy"] * 2


def test_a_retry_is_a_new_request_for_the_engine() -> None:
    """After a broken connection the engine may still work on the first one, and refuses its id."""
    ids: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        ids.append((await request.json())["rid"])
        if len(ids) == 1:
            assert request.transport is not None
            request.transport.abort()
        if len(ids) == 2:  # what the router's own second attempt is answered
            return web.json_response({"error": {"message": f"Duplicate request ID detected: {ids[0]}"}}, status=400)
        return web.json_response(answer([5], "a"))

    async def go() -> None:
        async with client_of(handle) as c:
            with use_scope(SampleScope()) as scope:
                assert (await c.generate([1], {})).tokens == [5]
        assert scope.requests == set() and c.num_retries == 2

    asyncio.run(go())
    assert len(set(ids)) == 3


def test_what_fails_after_an_interruption_is_not_asked_for_again() -> None:
    """Prefill and decode engines answer an abort with HTTP 500."""

    async def go() -> None:
        scope = SampleScope()

        def fail(body: Any) -> int:
            scope.interrupt(0.0)
            return 500

        async with scripted_engine(fail) as (url, received), EngineClient(url, max_in_flight=4, timeout_s=60) as c:
            with use_scope(scope):
                result = await c.generate([1], {})
        assert (result.tokens, result.finish_reason) == ([], "abort")
        assert len(received) == 1 and scope.was_cut and scope.requests == set()

    asyncio.run(go())


def test_retries_end_at_the_deadline_with_the_last_failure() -> None:
    async def go() -> None:
        async with scripted_engine(lambda body: 503) as (url, _):
            async with EngineClient(url, max_in_flight=4, timeout_s=2.0) as client:
                with pytest.raises(TimeoutError, match=r"--request-timeout-s 2; last: HTTP 503"):
                    await client.generate([1], {})

    asyncio.run(go())


def test_unreachable_engine_ends_at_the_deadline() -> None:
    async def go() -> None:
        async with EngineClient("http://127.0.0.1:9", max_in_flight=1, timeout_s=1.0) as client:
            with pytest.raises(TimeoutError, match="ClientConnectorError"):
                await client.generate([1], {})

    asyncio.run(go())


def test_answer_with_missing_log_probs_is_refused() -> None:
    broken = answer([1, 2])
    broken["meta_info"]["output_token_logprobs"].pop()

    async def go() -> None:
        async with scripted_engine(lambda body: broken) as (url, _):
            async with EngineClient(url, max_in_flight=1, timeout_s=60) as client:
                with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
                    await client.generate([1], {})

    asyncio.run(go())


@pytest.mark.parametrize("odd", [{"error": "full"}, [1], {"meta_info": None, "output_ids": [1]}, "text"])
def test_answer_that_is_no_generation_is_shown(odd: object) -> None:
    async def go() -> None:
        async with scripted_engine(lambda body: odd) as (url, _):
            async with EngineClient(url, max_in_flight=1, timeout_s=60) as client:
                with pytest.raises(ValueError, match="answered something else than a generation"):
                    await client.generate([1], {})

    asyncio.run(go())


@pytest.mark.parametrize("value", [None, float("inf"), "-1.5"])
def test_answer_with_a_log_prob_that_is_no_number_is_refused(value: object) -> None:
    broken = answer([1, 2])
    broken["meta_info"]["output_token_logprobs"][1][0] = value

    async def go() -> None:
        async with scripted_engine(lambda body: broken) as (url, _):
            async with EngineClient(url, max_in_flight=1, timeout_s=60) as client:
                with pytest.raises(ValueError, match=r"no finite number.*token 1 of 2|JSON"):
                    await client.generate([1], {})

    asyncio.run(go())


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    now, most = 0, 0
    three_are_there = asyncio.Event()

    async def slow(body: dict[str, object]) -> dict[str, object]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            three_are_there.set()
        await three_are_there.wait()
        await asyncio.sleep(0.02)
        now -= 1
        return answer([1])

    async def go() -> None:
        async with scripted_engine(slow) as (url, received):
            async with EngineClient(url, max_in_flight=3, timeout_s=60) as client:
                await asyncio.gather(*(client.generate([1], {}) for _ in range(12)))
        assert most == 3 and len(received) == 12

    asyncio.run(go())


def test_a_routing_key_travels_as_the_routers_header() -> None:
    seen: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.headers.get(ROUTING_HEADER))
        return web.json_response(answer([5], "a"))

    async def go() -> None:
        async with client_of(handle) as c:
            await c.generate([1], {}, routing_key="4-7")
            await c.generate([1, 2, 3], {})
            assert (c.num_prompt_tokens, c.num_cached_tokens) == (4, 0)

    asyncio.run(go())
    assert seen == ["4-7", None]


def test_who_gives_up_before_its_turn_no_longer_waits_for_a_slot() -> None:
    async def go() -> None:
        release = asyncio.Event()

        async def reply() -> dict[str, object]:
            await release.wait()
            return answer([5])

        async with scripted_engine(lambda body: reply()) as (url, _):
            async with EngineClient(url, max_in_flight=1, timeout_s=60) as client:
                with use_scope(SampleScope()) as scope:
                    first = asyncio.create_task(client.generate([1], {}))
                    second = asyncio.create_task(client.generate([2], {}))
                    async with asyncio.timeout(60):
                        while scope.queued != 1:
                            await asyncio.sleep(0.01)
                    second.cancel()
                    await asyncio.wait({second})
                    assert scope.queued == 0
                    release.set()
                    assert (await first).tokens == [5]

    asyncio.run(go())
