"""Engines that somebody else runs, as HTTP servers that this test starts and stops: waited for, watched, never started.
Also what an engine must show before it gets traffic again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from factories import make_config
from processes import wait_for

from slime_rl.cluster.engines import EngineGroup, ExternalEngine
from slime_rl.engine.guard import EngineGuard, EngineState
from slime_rl.engine.ports import free_port


class Answers(ThreadingHTTPServer):
    """What an engine says of its weights."""

    daemon_threads = True
    version, checksum, tp_size = "0", "abc", 1
    checked = 0  # times that the checksum was asked for


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        told = {
            "/model_info": {"weight_version": self.server.version},
            "/server_info": {"tp_size": self.server.tp_size},
        }
        self._say(told.get(self.path, {}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.checked += 1
        self._say({"per_engine_checksum": self.server.checksum})

    def _say(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def engine(port: int | None = None) -> Iterator[tuple[str, Answers]]:
    """At a port of those that the kernel hands to nobody, so that it is still free when an engine comes back."""
    server = Answers(("127.0.0.1", port or free_port()), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        server.server_close()


class Router:
    """Remembers who is behind it."""

    def __init__(self) -> None:
        self.behind: list[str] = []

    def is_alive(self) -> bool:
        return True

    def answers(self, timeout_s: float) -> bool:
        return True

    def end(self) -> None: ...

    def restart(self, engine_urls: list[str]) -> None: ...

    def add_worker(self, url: str) -> None:
        self.behind.append(url)

    def remove_worker(self, url: str) -> None:
        self.behind = [other for other in self.behind if other != url]


@contextmanager
def watched(tmp_path: Path, urls: list[str]) -> Iterator[tuple[EngineGroup, Router]]:
    """A group of these engines behind a router that only remembers."""
    flags = ("--engine-health-interval-s", "0.02", "--engine-health-timeout-s", "2")
    config, router = make_config(tmp_path, "--rollout-external-engine-addrs", *urls, *flags), Router()
    group = EngineGroup(config, [ExternalEngine(config, url) for url in urls])
    group.guard = EngineGuard(config, router)
    group.connect(urls)
    try:
        yield group, router
    finally:
        group.guard.close()


def test_one_that_goes_away_is_waited_for_and_serves_when_it_has_the_weights_again(tmp_path: Path) -> None:
    first = ExitStack()
    url, server = first.enter_context(engine())
    with engine() as (sound, kept), watched(tmp_path, [sound, url]) as (group, router):
        guard = group.guard
        assert router.behind == [sound, url]
        first.close()
        wait_for(lambda: guard.urls(EngineState.DOWN) == [url] and router.behind == [sound])
        with engine(server.server_port) as (_, again):
            wait_for(lambda: guard.urls(EngineState.STALE) == [url])
            kept.version = again.version = "3"
            again.checksum = "of other weights"
            group.settle(3, [sound, url], {})
            wait_for(lambda: guard.num_restarts["engine"] == 2 and guard.urls(EngineState.STALE) == [url])
            assert router.behind == [sound]
            again.checksum = kept.checksum
            group.settle(3, [sound, url], {})
            assert router.behind == [sound, url]
            assert guard.urls(EngineState.SERVING) == [sound, url]
    log = (tmp_path / "run" / "logs" / "faults.log").read_text()
    assert "engine 1 has not answered its health checks" in log
    assert "('3', 'of other weights') where ('3', 'abc') is expected" in log


def test_checksums_are_compared_among_engines_of_one_size(tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = [stack.enter_context(engine()) for _ in range(6)]
        urls, servers = [url for url, _ in found], [server for _, server in found]
        group, router = stack.enter_context(watched(tmp_path, urls))
        guard = group.guard
        for server, size in zip(servers, (1, 2, 2, 1, 2, 4), strict=True):
            server.version, server.tp_size, server.checksum = "3", size, f"of {size} ranks"
        for member in guard._members[3:]:
            member.state = EngineState.STALE
        router.behind = urls[:3]
        servers[4].checksum = servers[0].checksum  # as an engine of another size has it
        group.settle(3, urls, {})
        assert router.behind == [*urls[:4], urls[5]], "there is none of four ranks to compare with"
        assert [server.checked for server in servers] == [1] * 6
        servers[5].version = "2"
        guard._members[5].state = EngineState.STALE
        group.settle(3, [urls[5]], {})
        wait_for(lambda: guard.num_restarts["engine"] == 2)
    log = (tmp_path / "run" / "logs" / "faults.log").read_text()
    assert "engine 4 has version and checksum ('3', 'of 1 ranks') where ('3', 'of 2 ranks') is expected" in log
    assert "engine 5 has version and checksum ('2', 'of 4 ranks') where 3 is expected" in log


def test_an_engine_may_equal_any_sound_one_of_its_size(tmp_path: Path) -> None:
    """They may be cut in several ways (ep-size, dp-attention), and one of them may not tell."""
    with ExitStack() as stack:
        found = [stack.enter_context(engine()) for _ in range(4)]
        urls, servers = [url for url, _ in found], [server for _, server in found]
        group, router = stack.enter_context(watched(tmp_path, urls))
        for server, checksum in zip(servers, ("", "one way", "another", "another"), strict=True):
            server.version, server.checksum = "3", checksum
        group.guard._members[3].state, router.behind = EngineState.STALE, urls[:3]
        group.settle(3, urls, {})
        assert router.behind == urls
        servers[3].checksum = "wrong"
        group.guard._members[3].state, router.behind = EngineState.STALE, urls[:3]
        group.settle(3, urls, {})
        wait_for(lambda: group.guard.num_restarts["engine"] == 1)
        assert router.behind == urls[:3]
    log = (tmp_path / "run" / "logs" / "faults.log").read_text()
    assert "('3', 'wrong') where ('3', 'another') or ('3', 'one way') is expected" in log


def test_one_that_was_restarted_between_two_checks_is_noticed_by_its_version(tmp_path: Path) -> None:
    with engine() as (url, server), watched(tmp_path, [url]) as (group, router):
        server.version = "7"
        wait_for(lambda: group.guard._members[0].version == 7)
        server.version = "8-incomplete"  # in the middle of an update
        time.sleep(0.1)
        assert router.behind == [url]
        server.version = "0"
        wait_for(lambda: group.guard.urls(EngineState.STALE) == [url])
        assert router.behind == []
    log = (tmp_path / "run" / "logs" / "faults.log").read_text()
    assert "engine 0 has lost its weights: version 0 where it had 7; restarting" in log


def test_one_that_never_answers_is_named(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    config = make_config(tmp_path, "--rollout-external-engine-addrs", url, "--start-timeout-s", "0.1")
    with pytest.raises(RuntimeError, match=f"{url} does not answer within --start-timeout-s 0.1"):
        ExternalEngine(config, url).restart()
