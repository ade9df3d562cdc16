"""Tools of a Model Context Protocol server that is a program of ours: JSON-RPC, one line a message, over its pipes.

    McpServer(command) ──initialize, tools/list──► schemas ──tools/call──► text

    call ──queue──► writer thread ──pipe──► server ──pipe──► reader thread ──► the call's future

The writer thread starts the server, and again when it has died. A server that does not read its pipe holds this thread
and no other; a call that waits in vain for its line to be written ends the server. The server ends with us (its input
closes, and the kernel kills it when we die). Resources, prompts and servers behind HTTP are left out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import itertools
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = "2025-06-18"
PR_SET_PDEATHSIG = 1
MAX_PAGES = 100  # of a list of tools; a server may repeat its cursor for ever
MAX_LINE_BYTES = 64 * 1024 * 1024  # of an answer; a line without an end would fill the memory
NO_SUCH_METHOD = -32601

Answer = concurrent.futures.Future[Any]


class McpError(Exception):
    """The server answered with an error or in another form, or ended."""


@dataclass(eq=False)
class _Request:
    method: str
    params: dict[str, Any]
    answer: Answer = field(default_factory=concurrent.futures.Future)
    is_written: bool = False


class McpServer:
    """One server process. `timeout_s` bounds its start; calls bring their own."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self.command, self.timeout_s = list(command), timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, Answer] = {}  # of the process that runs
        self._requests: queue.SimpleQueue[_Request | dict[str, Any] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._writing: _Request | None = None  # the request whose line is going into the pipe
        self._life = threading.Lock()  # of the writer thread

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of its tools, as in the OpenAI API; starts the server.

        Raises:
            McpError: it cannot be started, does not answer in time, or lists tools in another form.
        """
        found: list[dict[str, Any]] = []
        cursor: Any = None
        for _ in range(MAX_PAGES):
            request = self._ask("tools/list", {"cursor": cursor} if cursor else {})
            page = _record(self._wait(request), "tools/list")
            tools = page.get("tools")
            if not isinstance(tools, list):
                raise McpError(f"tools/list must give a list of tools, got {tools!r}")
            found += [_schema(tool) for tool in tools]
            cursor = page.get("nextCursor")
            if not cursor:
                return found
        raise McpError(f"tools/list has more than {MAX_PAGES} pages")

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """The text of a tool's answer.

        Raises:
            McpError: the tool or the server failed.
            TimeoutError: no answer within `timeout_s`; the call is given up. The server goes on if it has read it.
        """
        request = self._ask("tools/call", {"name": name, "arguments": arguments})
        try:
            async with asyncio.timeout(timeout_s):
                result = _record(await asyncio.wrap_future(request.answer), "tools/call")
        finally:
            self._give_up(request)
        text = _text(result)
        if result.get("isError"):
            raise McpError(text)
        return text

    def close(self) -> None:
        """End the server. May be called twice."""
        with self._life:
            writer, self._writer = self._writer, None
        if writer is not None:
            self._requests.put(None)
        self._kill()

    def _ask(self, method: str, params: dict[str, Any]) -> _Request:
        request = _Request(method, params)
        with self._life:
            if self._writer is None:
                self._writer = threading.Thread(target=self._serve, name="mcp-writer", daemon=True)
                self._writer.start()
            self._requests.put(request)
        return request

    def _wait(self, request: _Request) -> Any:
        try:
            return request.answer.result(self.timeout_s)
        except concurrent.futures.TimeoutError:
            raise McpError(f"{self.command} gave no answer within {self.timeout_s:g} s") from None
        finally:
            self._give_up(request)

    def _give_up(self, request: _Request) -> None:
        """After its time: a request that has an answer is left alone, one that fills the pipe ends the server."""
        if self._writing is request and not request.is_written:
            self._kill()
        request.answer.cancel()

    def _serve(self) -> None:
        """What the writer thread does. A dict is an answer of ours to the server."""
        while (request := self._requests.get()) is not None:
            if isinstance(request, dict):
                with contextlib.suppress(McpError):
                    self._write(request)
                continue
            if request.answer.cancelled():
                continue
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                self._writing = request
                self._send(request)
            except McpError as error:
                _settle(request.answer, error=error)
            except (ValueError, RecursionError) as error:
                _settle(request.answer, error=McpError(f"the arguments cannot be sent: {error}"))
            finally:
                self._writing = None

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_die_with_parent
            )
        except OSError as error:
            raise McpError(f"cannot start {self.command}: {error}") from error
        self._process, self._waiting = process, {}
        threading.Thread(target=self._read, args=(process, self._waiting), name="mcp-reader", daemon=True).start()
        about = {"name": "slime_rl", "version": "0.1"}
        hello = _Request("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about})
        try:
            self._send(hello)
            self._wait(hello)
            self._write({"jsonrpc": "2.0", "method": "notifications/initialized"})
        except McpError:
            self._kill()  # one that was not greeted must not get calls
            raise

    def _send(self, request: _Request) -> None:
        number = next(self._ids)
        waiting = self._waiting
        waiting[number] = request.answer
        request.answer.add_done_callback(lambda _: waiting.pop(number, None))
        self._write({"jsonrpc": "2.0", "id": number, "method": request.method, "params": request.params})
        request.is_written = True

    def _write(self, message: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise McpError(f"{self.command} has ended")
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise McpError(f"{self.command} has ended") from error

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _read(self, process: subprocess.Popen[bytes], waiting: dict[int, Answer]) -> None:
        """What the reader thread does; what is no message is the server's own talk."""
        assert process.stdout is not None
        while line := process.stdout.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                process.kill()
                break
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict):
                self._take(message, waiting)
        process.kill()  # it closed its output: whoever asks next must find it ended, and start another
        process.wait()
        for answer in list(waiting.values()):
            _settle(answer, error=McpError(f"{self.command} has ended"))

    def _take(self, message: dict[str, Any], waiting: dict[int, Answer]) -> None:
        number = message.get("id")
        if "method" in message:  # the server asks us; who waits for ever would hang
            if number is not None:
                error = {"code": NO_SUCH_METHOD, "message": "there is no such method"}
                answer = {"result": {}} if message["method"] == "ping" else {"error": error}
                self._requests.put({"jsonrpc": "2.0", "id": number, **answer})
            return
        answer = waiting.get(number) if type(number) is int else None
        if answer is None:
            return
        if "error" in message:
            told = message["error"]
            _settle(answer, error=McpError(str(told.get("message", told) if isinstance(told, dict) else told)))
        else:
            _settle(answer, message.get("result"))


def _settle(answer: Answer, value: Any = None, error: McpError | None = None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up, or answered before
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)


def _record(result: Any, method: str) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise McpError(f"{method} must give an object, got {result!r:.300}")
    return result


def _schema(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise McpError(f"a tool must be an object with a name, got {tool!r:.300}")
    parameters = tool.get("inputSchema", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict):
        raise McpError(f"the inputSchema of {tool['name']} must be an object, got {parameters!r:.300}")
    function = {"name": tool["name"], "description": str(tool.get("description") or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def _text(result: dict[str, Any]) -> str:
    """Text parts by line, a mark for each other part; structured content where there are no parts."""
    parts = result.get("content") or []
    if not isinstance(parts, list):
        raise McpError(f"the content of an answer must be a list, got {parts!r:.300}")
    if not parts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(_part(part) for part in parts)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    return f"[{part.get('type') if isinstance(part, dict) else type(part).__name__}]"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
