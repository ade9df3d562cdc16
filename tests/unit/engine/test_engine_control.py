"""The control client against a scripted server: what is sent, what fails at once, what is tried again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from factories import make_config

from slime_rl.engine import control
from slime_rl.engine.control import DEFAULT_TIMEOUT_S, EngineControl, EngineError, EngineRefused
from slime_rl.engine.ports import free_port


class ScriptedEngine:
    """Answers every route with `answers[path]` (status, body), 200 and {} when not given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.delay_s = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json() if request.can_read_body else None))
        await asyncio.sleep(self.delay_s)
        status, body = self.answers.get(request.path, (200, {}))
        return web.json_response(body, status=status)


@asynccontextmanager
async def running(engine: ScriptedEngine, port: int = 0) -> AsyncIterator[EngineControl]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with EngineControl(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=60) as control:
            yield control
    finally:
        await runner.cleanup()


def test_refusals_fail_at_once_with_the_engines_answer() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.answers["/begin_weight_update"] = (400, {"message": "packed weights"})
        async with running(engine) as control:
            with pytest.raises(EngineRefused, match=r"/begin_weight_update refused: HTTP 400: .*packed weights"):
                await control.begin_weight_update()
        assert len(engine.calls) == 1

    asyncio.run(scenario())


def test_every_rank_gets_the_instruction_and_the_server_is_asked_once_how_many_there_are() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.answers["/server_info"] = (200, {"tp_size": 3, "pp_size": 1})
        async with running(engine) as control:
            await control.update_by_instruction("text")
            await control.update_by_instruction("text")
            assert [path for path, _ in engine.calls].count("/server_info") == 1
            assert [body["serialized_named_tensors"] for _, body in engine.calls[1:]] == [["text"] * 3] * 2
            engine.answers["/server_info"] = (200, {"tp_size": 2})  # somebody has started another one there
            assert [await control.num_ranks(), await control.num_ranks(anew=True)] == [3, 2]
            await control.update_by_instruction("text")
            assert engine.calls[-1][1]["serialized_named_tensors"] == ["text"] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "told",
    [
        {},
        [],
        None,
        "2",
        *({"tp_size": size} for size in (None, "two", 0, -3, 2.7, True, 10**9)),
        {"tp_size": 2, "dp_size": 2},
    ],
)
def test_a_server_that_does_not_tell_its_ranks_is_refused(told: object) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.answers["/server_info"] = (200, told)
        engine.answers["/weights_checker"] = (200, told)
        async with running(engine) as control:
            with pytest.raises(EngineRefused, match=r"/server_info must tell its tp_size, got|must have dp-size 1"):
                await control.num_ranks()
            with pytest.raises(EngineRefused, match="/weights_checker must tell a checksum, got"):
                await control.checksum()

    asyncio.run(scenario())


def test_damaged_json_is_a_failure_of_the_engine() -> None:
    class Damaged(ScriptedEngine):
        async def handle(self, request: web.Request) -> web.Response:
            return web.Response(body=b'{"tp_size": ', content_type="application/json")

    async def scenario() -> None:
        async with running(Damaged()) as control:
            with pytest.raises(EngineError, match="/server_info: JSONDecodeError"):
                await control.num_ranks()

    asyncio.run(scenario())


def test_a_server_in_pipeline_stages_is_refused() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.answers["/server_info"] = (200, {"tp_size": 2, "pp_size": 4})
        async with running(engine) as control:
            with pytest.raises(EngineRefused, match="must have pp-size 1 to get weights, got 4"):
                await control.num_ranks()

    asyncio.run(scenario())


def test_an_update_that_a_dead_sender_left_open_is_ended_first() -> None:
    class OneUpdateOpen(ScriptedEngine):
        async def handle(self, request: web.Request) -> web.Response:
            is_first = not self.calls
            answer = await super().handle(request)
            return web.json_response({"message": "a session is already open"}, status=400) if is_first else answer

    async def scenario() -> None:
        engine = OneUpdateOpen()
        async with running(engine) as control:
            await control.begin_weight_update()
        assert [path for path, _ in engine.calls] == [
            "/begin_weight_update",
            "/end_weight_update",
            "/begin_weight_update",
        ]

    asyncio.run(scenario())


def test_an_engine_that_comes_up_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_TRIES", 9)  # a busy machine may take its time to start one

    async def scenario() -> None:
        engine, port = ScriptedEngine(), free_port()
        async with EngineControl(f"http://127.0.0.1:{port}") as early:
            waiting = asyncio.create_task(early.pause("retract"))
            await asyncio.sleep(0.1)
            async with running(engine, port):
                await waiting
        assert engine.calls == [("/pause_generation", {"mode": "retract"})]

    asyncio.run(scenario())


def test_an_engine_that_stays_away_is_an_error_soon() -> None:
    async def scenario() -> None:
        async with EngineControl(f"http://127.0.0.1:{free_port()}") as control:
            with pytest.raises(EngineError, match=r"/model_info: .*Connect"):
                await control.weight_version()

    started = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - started < DEFAULT_TIMEOUT_S / 5


def test_no_answer_in_time_is_an_error() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.delay_s = 1.0
        async with running(engine) as control:
            assert not await control.is_healthy(timeout_s=0.1)
            control.timeout_s = 0.1
            with pytest.raises(EngineError, match=r"no answer within 0\.1 s"):
                await control.flush_cache()

    asyncio.run(scenario())


def test_memory_is_released_once_and_only_when_idle() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with running(engine) as control:
            with pytest.raises(ValueError, match="'weights' is not released"):
                await control.resume_memory(("weights",))
            engine.answers["/flush_cache"] = (400, {"message": "busy"})
            with pytest.raises(EngineError, match="busy"):
                await control.release_memory()
            assert [path for path, _ in engine.calls] == ["/flush_cache"]
            engine.answers.clear()
            await control.release_memory(("weights",))
            with pytest.raises(ValueError, match="'weights' is already released"):
                await control.release_memory(("weights", "kv_cache"))
            await control.resume_memory(("weights",))
        assert [path for path, _ in engine.calls[1:]] == [
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ]

    asyncio.run(scenario())


def test_unknown_memory_tags_are_refused() -> None:
    with pytest.raises(ValueError, match="memory tag must be one of weights, kv_cache, cuda_graph, got 'kv'"):
        asyncio.run(EngineControl("http://127.0.0.1:1").release_memory(("kv",)))


def test_the_api_key_goes_with_every_request(tmp_path: Path) -> None:
    class Guarded(ScriptedEngine):
        async def handle(self, request: web.Request) -> web.Response:
            self.calls.append((request.path, request.headers.get("Authorization")))
            return web.json_response({"weight_version": "7"})

    (tmp_path / "key").write_text(" word\n")
    headers = make_config(tmp_path, "--engine-api-key-file", str(tmp_path / "key")).engine.authorization

    async def scenario() -> None:
        engine = Guarded()
        async with running(engine) as plain, EngineControl(plain.url, headers=headers) as control:
            assert await control.weight_version() == "7"
            await plain.weight_version()
        assert engine.calls == [("/model_info", "Bearer word"), ("/model_info", None)]

    asyncio.run(scenario())


def test_a_key_file_must_hold_one_word(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("two words")
    with pytest.raises(ValueError, match="--engine-api-key-file must be a file with one word in it"):
        make_config(tmp_path, "--engine-api-key-file", str(tmp_path / "key"))
