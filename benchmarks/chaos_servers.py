"""The engine and the trainer of benchmarks/chaos_buffer.py: small servers in processes of their own, to be killed.

A server's socket belongs to the benchmark and outlives it. When it is killed, what it knew is gone: requests it was
answering break off, the trainer's model is lost. It is started again at once and answers at the same address.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import signal
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.chaos_account import Trained

TOKEN_S = 0.0003
CALL_TIMEOUT_S = 30.0


class Server:
    """A process that serves `make_app()`."""

    def __init__(self, name: str, make_app: Callable[[], web.Application]) -> None:
        self.name, self._make_app = name, make_app
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._socket.getsockname()[1])
        self._context = multiprocessing.get_context("fork")
        self._process: Any = None

    def keep_alive(self) -> None:
        """Start it unless it runs."""
        if self._process is None or not self._process.is_alive():
            self._process = self._context.Process(target=_serve, args=(self._socket, self._make_app), daemon=True)
            self._process.start()

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        if self._process is not None and self._process.is_alive():
            self.kill()
        self._socket.close()


def _serve(listening: socket.socket, make_app: Callable[[], web.Application]) -> None:
    async def go() -> None:
        runner = web.AppRunner(make_app())
        await runner.setup()
        await web.SockSite(runner, listening).start()
        await asyncio.Event().wait()

    asyncio.run(go())


def engine_app(version_file: Path) -> web.Application:
    """Answers /generate as SGLang does: one token after another, each by the weights that `version_file` names then."""
    aborted: set[str] = set()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        length = min(1 + sum(body["input_ids"]) % 17, body["sampling_params"]["max_new_tokens"])
        versions: list[str] = []
        while len(versions) < length and body["rid"] not in aborted:
            await asyncio.sleep(TOKEN_S)
            versions.append(version_file.read_text())
        tokens = [7] * len(versions)
        spans = [{"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)]
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "finish_reason": {"type": "stop" if len(versions) == length else "abort"},
            "weight_versions": spans,
        }
        return web.json_response({"text": "x" * len(tokens), "output_ids": tokens, "meta_info": meta})

    async def abort(request: web.Request) -> web.Response:
        aborted.add((await request.json())["rid"])
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", abort)])
    return app


def trainer_app() -> web.Application:
    """The "model" is the list of groups that it has trained on. Every call names the life that it was told by /load."""
    life, trained = uuid.uuid4().hex, []

    async def load(request: web.Request) -> web.Response:
        trained[:] = await request.json()
        return web.json_response(life)

    async def train(request: web.Request) -> web.Response:
        body = await request.json()
        if body["life"] == life:
            trained.append(body["entry"])
        return web.json_response(body["life"] == life)

    async def save(request: web.Request) -> web.Response:
        body = await request.json()
        if body["life"] == life:
            Path(body["path"]).write_text(json.dumps(trained))
        return web.json_response(body["life"] == life)

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/load", load), web.post("/train", train), web.post("/save", save)])
    return app


class TrainerLost(Exception):
    """The trainer's process ended."""


class Trainer:
    """The driver's handle of the trainer."""

    def __init__(self, port: int) -> None:
        self._port, self._life = port, ""

    def load(self, trained: Trained) -> None:
        """Start from what a checkpoint has trained on. It is asked again while it is being started."""
        while True:
            try:
                self._life = self._call("/load", trained)
                return
            except TrainerLost:
                continue

    def train(self, entry: tuple[int, int, int, int]) -> None:
        self._ask("/train", entry=entry)

    def save(self, path: Path) -> None:
        self._ask("/save", path=str(path))

    def _ask(self, route: str, **body: Any) -> None:
        if not self._call(route, {"life": self._life, **body}):
            raise TrainerLost("it was started again")

    def _call(self, route: str, body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CALL_TIMEOUT_S)
        try:
            connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise TrainerLost(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
