"""A dashboard that is served for a test, and the browser that looks at it."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_rl.dashboard.app import make_app
from slime_rl.dashboard.runs import Runs
from tools.headless_browser import Browser, find_programs


@contextmanager
def serve(paths: Sequence[Path]) -> Iterator[str]:
    """The dashboard's address."""
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(Runs(paths), ["127.0.0.1", "localhost"]), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.loads(answer.read())


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    try:
        find_programs()
    except ValueError as reason:
        pytest.skip(str(reason))
    with Browser() as browser:
        yield browser


def look(browser: Browser, url: str, address: str) -> str:
    """The text of a view, once it is drawn; nothing may have gone wrong in the browser."""
    browser.open("about:blank")  # the same page with another part after the # would not be loaded again
    browser.problems()  # of the page before, whose server may have ended
    browser.open(f"{url}/#{address}")
    browser.wait("return document.documentElement.dataset.ready")
    problems = browser.problems()  # 409 is how a run without metrics is answered
    assert [problem for problem in problems if "status of 409" not in problem] == []
    return browser.run("return document.getElementById('main').innerText")
