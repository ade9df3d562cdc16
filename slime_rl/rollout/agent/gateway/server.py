"""The HTTP side of the gateway: an agent's official client talks to it as if it were the API.

    base_url + "/chat/completions"   OpenAI, with stream        key: Authorization: Bearer KEY
    base_url + "/responses"          OpenAI, with stream
    base_url + "/messages"           Anthropic, with stream     key: x-api-key: KEY
    base_url + "/messages/count_tokens"
    base_url + "/models"             OpenAI; also one of them by its name
    base_url + "/session/reward"     {"reward": 1.0, "finish": true}: ours, for agents that know how they did; with
                                     "role" for the calls whose model is policy/ROLE

Anthropic's client adds /v1 itself and is given `root_url`. The server lives in the event loop of the rollout; a call
runs in the context of its session, so that it belongs to the session's sample.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from slime_rl.rollout.agent.gateway import anthropic_api, fields, openai_api, responses_api
from slime_rl.rollout.agent.gateway.sessions import GatewayError, Session, Turn
from slime_rl.rollout.agent.parsing import depth_of
from slime_rl.types import Sample, finite_number

MODEL = "policy"
Reader = Callable[[dict[str, Any]], dict[str, Any]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 64 * 1024 * 1024
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Api:
    """How one interface reads a request, and how it writes the answer (turn, id, model)."""

    read: Reader
    stream: Callable[[Turn, str, str, dict[str, Any]], Iterator[str]]  # and the request
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
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_in_api_form])
        app.router.add_post("/v1/chat/completions", partial(self._answer, CHAT))
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", partial(self._answer, MESSAGES))
        app.router.add_post("/v1/session/reward", self._reward)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        # A client that goes away cancels its call: what nobody reads would be sampled, and become a branch.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
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
            for call in session.calls:  # that nobody waits for any more
                call.cancel()

    def _session_of(self, request: web.Request) -> tuple[Session, contextvars.Context]:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._open:
            raise GatewayError(401, "the key names no open session")
        return self._open[key]

    async def _complete(self, request: web.Request, read: Reader) -> tuple[Session, Turn, dict[str, Any]]:
        session, context = self._session_of(request)
        body = await _body(request)
        fields.flag(body.get("stream"), "stream")
        arguments = {**read(body), "role": role_of(body.get("model"))}
        task = asyncio.get_running_loop().create_task(session.complete(**arguments), context=context)
        session.calls.add(task)
        task.add_done_callback(session.calls.discard)
        try:
            return session, await task, body
        except asyncio.CancelledError:
            if session.key not in self._open:
                raise GatewayError(409, "this session is finished") from None
            # The client has gone.
            if task.done() and not task.cancelled() and task.exception() is None:
                session.forget(task.result())
            task.cancel()
            raise

    async def _answer(self, api: Api, request: web.Request) -> web.StreamResponse:
        session, turn, body = await self._complete(request, api.read)
        identity, model = secrets.token_hex(8), str(body.get("model", MODEL))
        if body.get("stream"):
            return await _send(request, session, turn, api.stream(turn, identity, model, body))
        return web.json_response(api.whole(turn, identity, model))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = {}

        def read(body: dict[str, Any]) -> dict[str, Any]:
            asked.update(responses_api.read_request(body, self._session_of(request)[0].conversations))
            return asked

        session, turn, body = await self._complete(request, read)
        identity, model = secrets.token_hex(8), str(body.get("model", MODEL))
        answer = responses_api.response_of(turn, identity, model)
        kept = asked["messages"][bool(body.get("instructions")) :]  # instructions hold for one call
        session.conversations[answer["id"]] = [*kept[: len(kept) - turn.continues], turn.answer]
        if body.get("stream"):
            return await _send(request, session, turn, responses_api.stream(turn, identity, model))
        return web.json_response(answer)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        session, context = self._session_of(request)
        body = await _body(request)
        asked = anthropic_api.read_request(body)
        count = context.copy().run(session.count_prompt, asked["messages"], asked["tools"], role_of(body.get("model")))
        return web.json_response({"input_tokens": count})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._session_of(request)
        body = await _body(request)
        reward = finite(body.get("reward"))
        if role := fields.text(body.get("role") or "", "role"):
            if role not in {turn.role for turn in session.turns}:
                raise GatewayError(400, f"role {role!r} has made no call as model policy/ROLE")
            session.role_rewards[role] = reward
        else:
            session.reward = reward
        if fields.flag(body.get("finish"), "finish"):
            session.finish()
        return web.json_response({"reward": reward, "finished": session.finished.is_set()})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [_about_model(MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        """Any name is the policy's, as in calls."""
        return web.json_response(_about_model(request.match_info["name"]))


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, LookupError, RecursionError) as error:  # LookupError: of an encoding that nobody knows
        raise GatewayError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise GatewayError(400, "the body must be a JSON object")
    if depth_of(body) > fields.MAX_BODY_DEPTH:
        raise GatewayError(400, f"the body nests deeper than {fields.MAX_BODY_DEPTH}")
    return body


def finite(reward: Any) -> float:
    """A reward as a number that can be trained on."""
    if (number := finite_number(reward)) is not None:
        return number
    raise GatewayError(400, f"reward must be a finite number, got {fields.short(reward)}")


def _about_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "slime_rl"}


def role_of(model: Any) -> str:
    """ROLE of the model policy/ROLE; "" for any other name: agents may keep the one they were written with."""
    name, _, role = str(model).partition("/")
    return role if name == MODEL else ""


@web.middleware
async def _errors_in_api_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Clients read the body of an error, each in the form of its API."""
    try:
        return await handler(request)
    except GatewayError as error:
        return _refusal(request, error.status, str(error))
    except web.HTTPException as error:  # no such path, a body that is too large
        return _refusal(request, error.status, error.text or error.reason)
    except ConnectionError:
        raise  # there is nobody to tell
    except Exception as error:
        log.exception("The gateway could not answer %s", request.path)
        status = 504 if isinstance(error, TimeoutError) else 500
        return _refusal(request, status, f"{type(error).__name__}: {error}")


def _refusal(request: web.Request, status: int, message: str) -> web.Response:
    content: dict[str, Any]
    if request.path.startswith("/v1/messages"):
        kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        content = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        content = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return web.json_response(content, status=status)


async def _send(request: web.Request, session: Session, turn: Turn, events: Iterator[str]) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(request)
        for event in events:
            await response.write(event.encode())
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        session.forget(turn)
        raise
    return response
