"""The web application: one page, and the JSON that it draws.

/                      the page               /static/NAME           its scripts and style
/api/runs              folders and states
/api/runs/I/overview   flags, advice, error   /api/runs/I/metrics    every metric's points and meaning
/api/runs/I/samples    ?kind=training&step=N&order=…&find=TEXT&first=K   a few groups
/api/runs/I/spread     ?step=N                lengths, rewards and token ages of the logged samples
/api/runs/I/timeline   ?step=N or ?from=S&to=S   spans of --trace
/api/runs/I/engines    faults and ends of logs

Answers carry an ETag, so that a browser which asks every two seconds is mostly told that nothing has changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from slime_rl.dashboard.runs import Run, Runs, as_json
from slime_rl.dashboard.samples import ORDERS
from slime_rl.observability.tracker import TRAINING

STATIC = Path(__file__).parent / "static"
# Nothing but our own files runs, whatever text a sample holds.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; object-src 'none'; frame-ancestors 'none'"


def make_app(runs: Runs, hosts: list[str] | None = None) -> Starlette:
    """The application for these runs.

    `hosts` are the names it answers to (all when None). A page of another site that has its name resolve to this
    machine would otherwise read the runs through the user's browser.
    """

    def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": POLICY})

    def listing(_: Request) -> Response:
        found = runs.look()
        pairs = zip(found, runs.names(), strict=True)
        return _json([{"name": name, "folder": str(run.folder), "state": run.state} for run, name in pairs])

    def part(read: Callable[[Run, Request], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            number, known = request.path_params["number"], runs.look()
            if number >= len(known):
                return _json({"error": f"there is no run {number} of {len(known)}"}, 404)
            run = known[number]
            tag = f'"{hashlib.sha1(run.stamp.encode()).hexdigest()}"'
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers={"ETag": tag})
            try:
                with run.lock:
                    return _json(read(run, request), tag=tag)
            except (ValueError, OSError) as error:  # a question that makes no sense, or a folder that is gone
                return _json({"error": str(error)}, 409)

        return answer

    readers: dict[str, Callable[[Run, Request], Any]] = {
        "overview": lambda run, _: run.overview(),
        "metrics": lambda run, _: run.metrics(),
        "samples": _samples,
        "spread": lambda run, request: run.samples.spread(_number(request, "step")),
        "timeline": _timeline,
        "engines": lambda run, _: run.engines(),
    }
    routes = [
        Route("/", page),
        Route("/api/runs", listing),
        *(Route(f"/api/runs/{{number:int}}/{name}", part(read)) for name, read in readers.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
    return Starlette(routes=routes, middleware=guard)


def _samples(run: Run, request: Request) -> Any:
    words = request.query_params
    kind, order, first = words.get("kind", TRAINING), words.get("order", ORDERS[0]), _number(request, "first") or 0
    return run.samples.page(kind, _number(request, "step"), order, words.get("find", ""), max(0, first))


def _timeline(run: Run, request: Request) -> Any:
    words = request.query_params
    if "from" not in words:
        return run.timeline.window(_number(request, "step"))
    try:
        between = float(words["from"]), float(words["to"])
    except (KeyError, ValueError):
        between = math.nan, math.nan
    if not all(map(math.isfinite, between)):
        raise ValueError(f"from and to must be seconds, got {words.get('from')!r} and {words.get('to')!r}")
    return run.timeline.window(between=between)


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return None
    if not text.lstrip("-").isdecimal():
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(text)


def _json(value: Any, status: int = 200, tag: str | None = None) -> Response:
    headers = {"Cache-Control": "no-store"} if tag is None else {"Cache-Control": "no-cache", "ETag": tag}
    return Response(as_json(value), status_code=status, media_type="application/json", headers=headers)
