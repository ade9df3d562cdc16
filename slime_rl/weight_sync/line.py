"""Instructions to the receivers of engines on this machine, without an HTTP request for each.

    trainer: listens ◄─── connects ─── receiver, told to by one request ("follow") that lasts as long as the update
                     ──instruction──►
                     ◄─────ok──────── loaded          … for every bucket; an empty line ends it

A request is some ten milliseconds of work for the processes of an engine, a line is less than one. The socket is
abstract: it leaves no file behind. An engine of several ranks has no line: it gets each instruction by a request.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slime_rl.engine.control import EngineControl, EngineError
from slime_rl.weight_sync.instructions import Instruction
from slime_rl.weight_sync.session import EngineSession


@dataclass
class _Line:
    """To one engine. `request` is the HTTP request whose answer says how its part of the update ended."""

    request: asyncio.Task[None]
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # answers come in the order of the instructions


class EngineLines:
    """A line to every engine of one rank of a session for the time of one update. Failures are those of
    `EngineSession`."""

    def __init__(self, engines: EngineSession) -> None:
        self.engines = engines
        self._lines: dict[str, _Line] = {}  # by URL; none of engines of several ranks
        self._expected: dict[bytes, _Line] = {}  # by what it says first
        self._server: asyncio.AbstractServer | None = None

    def open(self) -> None:
        """Have every engine follow; returns when they do."""
        name = f"slime_rl_{secrets.token_hex(8)}"
        self._server = self.engines.do(asyncio.start_unix_server(self._accept, path=f"\0{name}"))
        self.engines.run(lambda engine, _: self._begin(engine, name))

    def send(self, instruction: Instruction) -> Future[list[Any]]:
        """Give the instruction to all; the future is done when they have followed it."""
        return self.engines.start(lambda engine, _: self._deliver(engine, instruction))

    def close(self) -> None:
        """The update is whole: wait until every engine says so."""
        self.engines.run(lambda engine, _: self._end(engine))
        self.drop()

    def drop(self) -> None:
        """Hang up, whatever goes on; an engine that still follows stops. Idempotent."""
        if self._server is not None:
            self.engines.do(self._drop())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = self._expected.pop(await reader.readline(), None)
        if line is None:  # not one of ours
            writer.close()
        else:
            line.connected.set_result((reader, writer))

    async def _begin(self, engine: EngineControl, name: str) -> None:
        if await engine.num_ranks() > 1:
            return
        word = secrets.token_hex(16)
        payload = Instruction(kind="follow", path=name, word=word).to_payload()
        request = asyncio.create_task(engine.update_by_instruction(payload))
        line = _Line(request, asyncio.get_running_loop().create_future())
        self._lines[engine.url] = self._expected[f"{word}\n".encode()] = line
        await asyncio.wait({request, line.connected}, return_when=asyncio.FIRST_COMPLETED)
        if not line.connected.done():
            await self._why(engine, line)

    async def _deliver(self, engine: EngineControl, instruction: Instruction) -> None:
        line = self._lines.get(engine.url)
        if line is None:
            return await engine.update_by_instruction(instruction.to_payload())
        reader, writer = line.connected.result()
        writer.write(instruction.to_text().encode() + b"\n")
        async with line.turn:
            reading = asyncio.create_task(reader.readline())
            await asyncio.wait({reading, line.request}, return_when=asyncio.FIRST_COMPLETED)
            answered = reading.done() and reading.exception() is None  # reset: it left with our next line unread
            if not answered or reading.result() != b"ok\n":
                reading.cancel()
                await self._why(engine, line)

    async def _end(self, engine: EngineControl) -> None:
        line = self._lines.get(engine.url)
        if line is not None:
            line.connected.result()[1].write(b"\n")
            await line.request

    async def _why(self, engine: EngineControl, line: _Line) -> None:
        """Raise what the engine answers to the request."""
        await line.request
        raise EngineError(f"engine {engine.url} left in the middle of a weight update")

    async def _drop(self) -> None:
        lines, self._lines, self._expected = list(self._lines.values()), {}, {}
        for line in lines:
            if line.connected.done():
                line.connected.result()[1].close()
        assert self._server is not None
        self._server.close()
        self._server = None
        for line in lines:
            line.request.cancel()  # a hung engine would not answer it; the others have ended
        await asyncio.gather(*(line.request for line in lines), return_exceptions=True)
