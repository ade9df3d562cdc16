"""A headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver) by the standard library alone.

Debian and Ubuntu: apt-get install chromium chromium-driver. CHROMIUM and CHROMEDRIVER may name the programs.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")


def find_programs() -> tuple[str, str]:
    """Paths of Chromium and chromedriver.

    Raises:
        ValueError: one is not there; says how to get it.
    """
    found = []
    for variable, names in (("CHROMIUM", CHROMIUMS), ("CHROMEDRIVER", ("chromedriver",))):
        asked = os.environ.get(variable)
        path = next((path for name in ([asked] if asked else names) if (path := shutil.which(name))), None)
        if path is None:
            wanted = asked or " or ".join(names)
            raise ValueError(f"no {wanted} here: apt-get install chromium chromium-driver, or set {variable}")
        found.append(path)
    return found[0], found[1]


class Browser:
    """One window; a context manager that ends what it has started."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        self.size = width, height

    def __enter__(self) -> Browser:
        chromium, driver = find_programs()
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            self._url = f"http://127.0.0.1:{self._port()}"
            width, height = self.size
            options = {
                "binary": chromium,
                "args": [
                    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                    *(f"--window-size={width},{height}", f"--user-data-dir={self._profile.name}"),
                ],
            }
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._url += f"/session/{session['sessionId']}"
            self.resize(width, height)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._call("DELETE", "", None)
        except (OSError, RuntimeError):
            pass  # it has crashed; its driver is ended all the same
        finally:
            self._end()

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.wait(10)
        self._profile.cleanup()

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                return int(match[1])
        raise RuntimeError("chromedriver ended before it was ready")

    def _call(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.loads(error.read())["value"]["message"]) from error

    def resize(self, width: int, height: int) -> None:
        """The size of the page, whatever the window has around it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def theme(self, name: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value of a JavaScript function body; `arguments` holds `args`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait(self, script: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Until `script` gives something true, which is returned.

        Raises:
            TimeoutError: with what the page shows.
        """
        end = time.monotonic() + timeout_s
        while not (value := self.run(script, *args)):
            if time.monotonic() > end:
                shown = self.run("return document.body.innerText")[:2000]
                raise TimeoutError(f"not true within {timeout_s:g} s: {script}\n{shown}")
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """As a user would: the element must be visible."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(found.values()))}/click", {})

    def move_to(self, selector: str) -> None:
        """The mouse over the middle of the first such element."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
            selector,
        )
        x, y = (int(value) for value in box)
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
        actions = [{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}]
        self._call("POST", "/actions", {"actions": actions})

    def type(self, selector: str, text: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(found.values()))}/value", {"text": text})

    def problems(self) -> list[str]:
        """Errors in the browser's console since the last look."""
        lines = self._call("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot", None)))
