"""Spans of the requests that one engine answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.engine.traced_requests import TracedRequests, trace_arguments, without_trace
from slime_rl.observability.trace import read_spans


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.05)
    if scope.get("fails"):
        raise ConnectionError


def spans_of(tmp_path: Path, *scopes: dict[str, Any]) -> list[dict[str, Any]]:
    app = TracedRequests(answer, tmp_path / "engine_0.jsonl")

    async def ask() -> None:
        await asyncio.gather(*(app(scope, None, None) for scope in scopes), return_exceptions=True)

    asyncio.run(ask())
    return read_spans(tmp_path)["engine_0"]  # there without a close: an engine is killed


def test_every_generating_request_is_a_span_and_nothing_else_is(tmp_path: Path) -> None:
    asked = [("http", "/generate"), ("http", "/generate"), ("http", "/v1/chat/completions"), ("http", "/health")]
    spans = spans_of(tmp_path, *({"type": kind, "path": path} for kind, path in asked), {"type": "lifespan"})
    assert [(span["track"], span["name"]) for span in spans] == [("requests", "request")] * 3
    assert all(0.04 < span["end"] - span["start"] < 60 for span in spans)


def test_a_request_that_fails_is_a_span_too(tmp_path: Path) -> None:
    assert len(spans_of(tmp_path, {"type": "http", "path": "/generate", "fails": True})) == 1


@pytest.mark.parametrize("traces", [True, False])
def test_the_engine_is_told_the_file_and_sglang_is_not(tmp_path: Path, traces: bool) -> None:
    told = trace_arguments(make_config(tmp_path, "--trace" if traces else "--no-trace"), "engine_3")
    rest, path = without_trace(["--model-path", "m", *told])
    assert rest == ["--model-path", "m"]
    assert path == ((tmp_path / "run" / "trace" / "engine_3.jsonl") if traces else None)
