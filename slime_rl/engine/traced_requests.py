"""When an engine has work, in its own words: with --trace each engine writes a span for every request it answers.

The router does not say which engine has a request, so a lane for each engine can only come from the engines.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from slime_rl.config import Config
from slime_rl.observability.trace import FOLDER, Trace

OPTION = "--slime-trace-file="
GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class TracedRequests:
    """ASGI middleware: from the arrival of a generating request to the end of its answer, its queue included."""

    def __init__(self, app: App, path: Path) -> None:
        self._app, self._trace, self._running = app, Trace(path), 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        start = time.time()
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            self._trace.add("requests", "request", start, time.time())
            if not self._running:
                self._trace.flush()  # it may be long until the next one, or never


def trace_arguments(config: Config, name: str) -> list[str]:
    """What the engine's command line says: nothing without --trace."""
    path = (config.run_dir / FOLDER / f"{name}.jsonl").absolute()
    return [f"{OPTION}{path}"] if config.logging.trace else []


def without_trace(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """(the arguments for SGLang, where spans go)."""
    paths = [Path(word.removeprefix(OPTION)) for word in argv if word.startswith(OPTION)]
    return [word for word in argv if not word.startswith(OPTION)], paths[-1] if paths else None


def install(path: Path | None) -> None:
    """Put it into SGLang's server; before that starts, in its process."""
    if path is not None:
        server = importlib.import_module("sglang.srt.entrypoints.http_server")
        server.app.add_middleware(TracedRequests, path=path)
