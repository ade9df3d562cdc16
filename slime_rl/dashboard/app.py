"""The web application: one page, and the JSON that it draws.

/                      the page          /static/NAME           its script and style
/api/runs              folders and states
/api/runs/I/overview   flags, advice     /api/runs/I/metrics    every metric's points and meaning
/api/runs/I/samples    ?step=N           /api/runs/I/timeline   spans of --trace
"""

from __future__ import annotations

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

from slime_rl.dashboard.runs import Run, as_json

STATIC = Path(__file__).parent / "static"


def make_app(runs: list[Run], hosts: list[str] | None = None) -> Starlette:
    """The application for these runs.

    `hosts` are the names it answers to (all when None). A page of another site that has its name resolve to this
    machine would otherwise read the runs through the user's browser.
    """

    def listing(_: Request) -> Response:
        return _json([{"name": run.folder.name, "folder": str(run.folder), "state": run.state} for run in runs])

    def part(read: Callable[[Run, Request], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            number = request.path_params["number"]
            if number >= len(runs):
                return _json({"error": f"there is no run {number} of {len(runs)}"}, 404)
            try:
                return _json(read(runs[number], request))
            except ValueError as error:  # no metrics yet, or a file that is broken
                return _json({"error": str(error)}, 409)

        return answer

    def samples(run: Run, request: Request) -> Any:
        step = request.query_params.get("step")
        return run.samples(int(step) if step else None)

    routes = [
        Route("/", lambda _: FileResponse(STATIC / "index.html")),
        Route("/api/runs", listing),
        Route("/api/runs/{number:int}/overview", part(lambda run, _: run.overview())),
        Route("/api/runs/{number:int}/metrics", part(lambda run, _: run.metrics())),
        Route("/api/runs/{number:int}/samples", part(samples)),
        Route("/api/runs/{number:int}/timeline", part(lambda run, _: run.timeline())),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
    return Starlette(routes=routes, middleware=guard)


def _json(value: Any, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(as_json(value), status_code=status, media_type="application/json", headers=headers)
