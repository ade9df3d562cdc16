"""Ports, and the lines of a log that say what went wrong."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import make_config

from slime_rl.engine import server
from slime_rl.engine.ports import free_port, node_ip
from slime_rl.engine.server import EngineServer, useful_lines

LOG = """[2026-01-01 00:00:00] Init begin.
[2026-01-01 00:00:01] Scheduler hit an exception: Traceback (most recent call last):
Traceback (most recent call last):
  File "loader.py", line 1, in load
    raise OSError("no file named model.safetensors")
OSError: no file named model.safetensors

[2026-01-01 00:00:02] Received sigquit from a child process.
Traceback (most recent call last):
  File "engine.py", line 9, in start
EOFError
"""


def test_the_first_exception_comes_first() -> None:
    lines = useful_lines(LOG, num_lines=2)
    assert lines == ["OSError: no file named model.safetensors", '  File "engine.py", line 9, in start', "EOFError"]


def test_free_ports_can_be_bound_and_differ() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 15
    bound = 0
    for port in ports:
        with socket.socket() as server, contextlib.suppress(OSError):  # another process may take one first
            server.bind(("127.0.0.1", port))
            bound += 1
    assert bound > 10


def test_node_ip_is_an_address_of_this_machine() -> None:
    address = node_ip()
    with socket.socket() as server:
        server.bind((address, 0))  # only an address of this machine can be bound
        assert server.getsockname()[0] == address


def test_a_server_that_goes_on_without_one_of_its_ports_has_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang does where a prefill engine's second port is taken: its decode engines would wait for ever."""
    config = make_config(tmp_path)
    logs = [
        "Server error: [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
    ]
    logs += ["fine"]

    def launch(self: EngineServer) -> None:
        self.log_path.parent.mkdir(exist_ok=True)
        self.log_path.write_text(logs.pop(0))
        self._url = "http://127.0.0.1:1"
        running = {"is_running": lambda: True, "poll": lambda: None, "is_suspended": lambda: False}
        self._process = SimpleNamespace(**running, stop=lambda _: None)  # type: ignore[assignment]

    monkeypatch.setattr(EngineServer, "_launch", launch)
    monkeypatch.setattr(server, "answers", lambda _: True)
    engine = EngineServer(config, 0, tmp_path)
    engine.launch()
    assert engine.look() is False and engine.port_was_taken()
    assert str(engine.failure()).startswith("engine 0 has lost one of its ports to another process; the end of ")
    logs.insert(0, "address already in use: error while attempting to bind on address")
    engine.start()
    assert logs == [], "it was started once more, at other ports"
