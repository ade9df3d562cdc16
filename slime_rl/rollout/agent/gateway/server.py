"""The HTTP side of the gateway: an agent's official client talks to it as if it were the API.

    base_url + "/chat/completions"   OpenAI, with stream        key: Authorization: Bearer KEY
    base_url + "/responses"          OpenAI, with stream
    base_url + "/messages"           Anthropic, with stream     key: x-api-key: KEY
    base_url + "/models"             OpenAI
    base_url + "/session/reward"     {"reward": 1.0, "finish": true}: ours, for agents that know how they did; with
                                     "role" for the calls whose model is policy/ROLE

Anthropic's client adds /v1 itself and is given `root_url`. The server lives in the event loop of the rollout; a call
runs in the context of its session, so that it belongs to the session's sample.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from slime_rl.rollout.agent.gateway import anthropic_api, openai_api, responses_api
from slime_rl.rollout.agent.gateway.sessions import GatewayError, Session, Turn
from slime_rl.types import Sample

MODEL = "policy"
Reader = Callable[[dict[str, Any]], dict[str, Any]]
MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Api:
    """How one interface reads a request, and how it writes the answer (turn, id, model)."""

    read: Reader
    stream: Callable[[Turn, str, str], Iterator[str]]
    whole: Callable[[Turn, str, str], dict[str, Any]]


CHAT = Api(openai_api.read_request, openai_api.stream, openai_api.completion)
MESSAGES = Api(anthropic_api.read_request, anthropic_api.stream, anthropic_api.message_of)


class Gateway:
    """Serves the sessions that are open. `await start()` before, `await close()` after."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = 0
        self._open: dict[str, tuple[Session, contextvars.Context]] = {}
        self._runner: web.AppRunner | None = None

    @property
    def root_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", partial(self._answer, CHAT))
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", partial(self._answer, MESSAGES))
        app.router.add_post("/v1/session/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        listener = socket.create_server((self.host, 0), backlog=1024)
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def session(self, sample: Sample, sampling_params: dict[str, Any]) -> Iterator[Session]:
        """A session for the time of the block; later calls with its key are refused."""
        session = Session(f"session-{secrets.token_hex(12)}", sample, sampling_params)
        self._open[session.key] = (session, contextvars.copy_context())
        try:
            yield session
        finally:
            session.finish()
            del self._open[session.key]

    def _session_of(self, request: web.Request) -> tuple[Session, contextvars.Context]:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._open:
            raise GatewayError(401, "the key names no open session")
        return self._open[key]

    async def _complete(self, request: web.Request, read: Reader) -> tuple[Turn, Any]:
        session, context = self._session_of(request)
        try:
            body = await request.json()
        except ValueError as error:
            raise GatewayError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise GatewayError(400, "the body must be a JSON object")
        arguments = {**read(body), "role": role_of(body.get("model"))}
        task = asyncio.get_running_loop().create_task(session.complete(**arguments), context=context)
        try:
            return await task, body
        except asyncio.CancelledError:
            task.cancel()  # the client has gone
            raise

    async def _answer(self, api: Api, request: web.Request) -> web.StreamResponse:
        try:
            turn, body = await self._complete(request, api.read)
        except GatewayError as error:
            return _refusal(error)
        identity, model = secrets.token_hex(8), str(body.get("model", MODEL))
        if body.get("stream"):
            return await _send(request, api.stream(turn, identity, model))
        return web.json_response(api.whole(turn, identity, model))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        try:
            session, _ = self._session_of(request)
            asked: dict[str, Any] = {}

            def read(body: dict[str, Any]) -> dict[str, Any]:
                asked.update(responses_api.read_request(body, session.conversations))
                return asked

            turn, body = await self._complete(request, read)
        except GatewayError as error:
            return _refusal(error)
        identity, model = secrets.token_hex(8), str(body.get("model", MODEL))
        answer = responses_api.response_of(turn, identity, model)
        kept = (
            asked["messages"][1:] if body.get("instructions") else asked["messages"]
        )  # instructions hold for one call
        session.conversations[answer["id"]] = [*kept, turn.answer]
        if body.get("stream"):
            return await _send(request, responses_api.stream(turn, identity, model))
        return web.json_response(answer)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        try:
            session, _ = self._session_of(request)
            body = await request.json()
            reward = body.get("reward")
            if isinstance(reward, bool) or not isinstance(reward, (int, float)):
                raise GatewayError(400, f"reward must be a number, got {reward!r}")
        except GatewayError as error:
            return _refusal(error)
        if body.get("role"):
            session.role_rewards[str(body["role"])] = float(reward)
        else:
            session.reward = float(reward)
        if body.get("finish"):
            session.finish()
        return web.json_response({"reward": float(reward), "finished": session.finished.is_set()})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "slime_rl"}]})


def role_of(model: Any) -> str:
    """ROLE of the model policy/ROLE; "" for any other name: agents may keep the one they were written with."""
    name, _, role = str(model).partition("/")
    return role if name == MODEL else ""


def _refusal(error: GatewayError) -> web.Response:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    content = {"type": "error", "error": {"type": kind, "message": str(error), "code": error.status}}
    return web.json_response(content, status=error.status)


async def _send(request: web.Request, events: Iterator[str]) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response
