"""Tools of a Model Context Protocol server that is a program of ours: JSON-RPC, one line a message, over its pipes.

    McpServer(command) ──initialize, tools/list──► schemas ──tools/call──► text

The server ends with us (its input closes, and the kernel kills it when we die). One that has died is started again at
the next call. Resources, prompts and servers behind HTTP are left out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import itertools
import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

PROTOCOL = "2025-06-18"
PR_SET_PDEATHSIG = 1


class McpError(Exception):
    """The server answered with an error, or ended."""


class McpServer:
    """One server process. `timeout_s` bounds its start; calls bring their own."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self.command, self.timeout_s = list(command), timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._life = threading.Lock()  # starting, and writing a line

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of its tools, as in the OpenAI API; starts the server.

        Raises:
            McpError: it cannot be started, or does not answer in time.
        """
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self._wait(self._send("tools/list", {"cursor": cursor} if cursor else {}))
            for tool in page["tools"]:
                parameters = tool.get("inputSchema", {"type": "object", "properties": {}})
                function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}
                found.append({"type": "function", "function": function})
            cursor = page.get("nextCursor")
            if not cursor:
                return found

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """The text of a tool's answer.

        Raises:
            McpError: the tool or the server failed.
            TimeoutError: no answer within `timeout_s`; the call is given up, the server goes on.
        """
        loop = asyncio.get_running_loop()
        sent = loop.run_in_executor(None, self._send, "tools/call", {"name": name, "arguments": arguments})
        async with asyncio.timeout(timeout_s):
            result = await asyncio.wrap_future(await sent)
        text = "\n".join(part.get("text", f"[{part.get('type')}]") for part in result.get("content", []))
        if result.get("isError"):
            raise McpError(text)
        return text

    def close(self) -> None:
        """End the server. May be called twice."""
        with self._life:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _send(self, method: str, params: dict[str, Any]) -> concurrent.futures.Future[Any]:
        with self._life:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._request(method, params)

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_die_with_parent
            )
        except OSError as error:
            raise McpError(f"cannot start {self.command}: {error}") from error
        threading.Thread(target=self._read, args=(self._process,), name="mcp-reader", daemon=True).start()
        about = {"name": "slime_rl", "version": "0.1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about}
        self._wait(self._request("initialize", hello))
        self._write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def _request(self, method: str, params: dict[str, Any]) -> concurrent.futures.Future[Any]:
        number = next(self._ids)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._waiting[number] = future
        self._write({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        return future

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise McpError(f"{self.command} has ended") from error

    def _wait(self, future: concurrent.futures.Future[Any]) -> Any:
        try:
            return future.result(self.timeout_s)
        except concurrent.futures.TimeoutError:
            raise McpError(f"{self.command} gave no answer within {self.timeout_s:g} s") from None

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError, AttributeError):  # what is no message is the server's own talk
                message = json.loads(line)
                future = self._waiting.pop(message.get("id"), None)
                if future is None or future.done():
                    continue
                if "error" in message:
                    future.set_exception(McpError(str(message["error"].get("message", message["error"]))))
                else:
                    future.set_result(message.get("result", {}))
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(McpError(f"{self.command} has ended"))
        self._waiting.clear()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
