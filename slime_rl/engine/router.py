"""sglang-router as a supervised process, and the list of engines behind it."""

from __future__ import annotations

import http.client
import json
import logging
import math
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from slime_rl.config import Config
from slime_rl.engine.api_key import key_file_arguments
from slime_rl.engine.environment import program_environment
from slime_rl.engine.ports import free_port
from slime_rl.engine.process import SupervisedProcess
from slime_rl.engine.server import PORT_TAKEN, PORT_TRIES, answers, useful_lines
from slime_rl.engine.vocabulary import NAME, VARIABLE, WAY_OUT

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
POLL_S = 0.05
PORT_PAUSE_S = 0.5
HEALTH_INTERVAL_S = 2  # the router's default of 60 leaves a dead engine in rotation for minutes
HEALTH_FAILURES = 2
NO_VOCABULARY = (
    f"--share-router: for several models sglang-router reads a vocabulary of OpenAI's, and downloads it unless "
    f"{VARIABLE} is a folder with {NAME}; {WAY_OUT}"
)


class RouterProcess:
    """A router; its log is RUN_DIR/logs/NAME.log. Requests go to `url`; control routes do not pass it.

    `disaggregated`: it sends each request to a prefill and to a decode engine. `shared`: it serves several models, and
    every request names the one it is for.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        host: str = "127.0.0.1",
        name: str = "router",
        disaggregated: bool = False,
        shared: bool = False,
    ) -> None:
        self.config, self.host, self.disaggregated, self.shared = config, host, disaggregated, shared
        self.log_path = Path(run_dir) / "logs" / f"{name}.log"
        self._process: SupervisedProcess | None = None
        self._url: str | None = None
        self._num_logs = 0

    @property
    def url(self) -> str:
        if self._url is None:
            raise RuntimeError("the router is not started")
        return self._url

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers within `timeout_s`."""
        return answers(f"{self.url}/liveness", timeout_s, self.config.engine.authorization)

    def end(self) -> None:
        """End its process, at once; who waits for an answer gets an error. `restart` may follow."""
        process = self._process
        if process is not None:
            process.stop(0.0)

    def restart(self) -> None:
        """End what is left of the router and start it again at the same address, with no engine behind it.

        Raises:
            RuntimeError: it did not start.
        """
        port = int(self.url.rpartition(":")[2])
        self.stop()
        self._num_logs += 1
        self.log_path.replace(self.log_path.with_suffix(f".{self._num_logs}.log"))
        deadline = time.monotonic() + self.config.cluster.start_timeout_s
        self._launch(port)
        while not self._wait(deadline):
            taken = any(text in self.log_path.read_text(errors="replace") for text in PORT_TAKEN)
            if not taken or time.monotonic() > deadline:
                raise RuntimeError(self._failure())
            assert self._process is not None
            self._process.stop()
            time.sleep(PORT_PAUSE_S)  # clients know this address only: wait until whoever took it lets it go
            self._launch(port)

    def start(self) -> None:
        """Start the router without any engine and wait until it listens.

        Raises:
            RuntimeError: it ended, or did not listen within --start-timeout-s; with its last log lines.
        """
        deadline = time.monotonic() + self.config.cluster.start_timeout_s
        for attempt in range(PORT_TRIES):
            self.stop()
            self._launch(free_port(self.host))
            if self._wait(deadline):
                return
            message = self._failure()
            self.stop()
            log = self.log_path.read_text(errors="replace")
            if attempt == PORT_TRIES - 1 or not any(text in log for text in PORT_TAKEN):
                raise RuntimeError(message)
            logger.warning("the router's port was taken by another process; choosing another")

    def _wait(self, deadline: float) -> bool:
        """False when the process ended or time ran out."""
        while self.is_alive() and time.monotonic() < deadline:
            if answers(f"{self.url}/liveness"):
                return True
            time.sleep(POLL_S)
        return False

    def _failure(self) -> str:
        what = "ended while it started"
        if self.is_alive():
            what = f"did not listen within --start-timeout-s {self.config.cluster.start_timeout_s:g}"
        log = self.log_path.read_text(errors="replace")
        lines = "\n  ".join(useful_lines(log))
        hint = f"\n{NO_VOCABULARY}" if self.shared and "Harmony encoding" in log else ""
        return f"the router {what}; the end of {self.log_path}:\n  {lines}{hint}"

    def is_alive(self) -> bool:
        process = self._process  # another thread may stop the router
        return process is not None and process.is_running()

    def stop(self, grace_s: float = 1.0) -> None:
        """End the router. Idempotent."""
        if self._process is not None:
            self._process.stop(grace_s)
            self._process = None
        self._url = None

    def add_worker(self, url: str, timeout_s: float = 60.0, *, model: str | None = None) -> None:
        """Put an engine behind the router; returns when requests can reach it. `model`: which one it serves, for a
        router that is shared.

        Raises:
            RuntimeError: the router refused it, or it was not routable within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        key = self.config.engine.api_key
        worker = (
            {"url": url} | ({} if key is None else {"api_key": key}) | ({} if model is None else {"model_id": model})
        )
        self._call("POST", "/workers", worker | (self._role(url) if self.disaggregated else {}))
        while time.monotonic() < deadline:
            worker = self._find(url)
            if worker is not None and worker["is_healthy"]:
                return
            time.sleep(POLL_S)
        raise RuntimeError(f"the router {self.url} did not take engine {url} within {timeout_s:g} s: {self._find(url)}")

    def remove_worker(self, url: str, timeout_s: float = 30.0) -> None:
        """Send no more requests to an engine; those in flight go on. Nothing happens when it is not there.

        Raises:
            RuntimeError: the router still has it after `timeout_s`.
        """
        worker = self._find(url)
        if worker is None:
            return
        self._call("DELETE", f"/workers/{worker['id']}")
        deadline = time.monotonic() + timeout_s
        while self._find(url) is not None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the router {self.url} still has engine {url} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def workers(self) -> dict[str, bool]:
        """Whether each engine is healthy, as the router sees it, by URL."""
        return {worker["url"]: worker["is_healthy"] for worker in self._call("GET", "/workers")["workers"]}

    def _role(self, url: str) -> dict[str, Any]:
        """What the router must be told of a prefill or decode engine, as the engine says it."""
        told = self._send("GET", f"{url}/server_info")
        mode = told["disaggregation_mode"]
        port = {"bootstrap_port": told["disaggregation_bootstrap_port"]} if mode == "prefill" else {}
        return {"worker_type": mode, **port}

    def _find(self, url: str) -> dict[str, Any] | None:
        return next((w for w in self._call("GET", "/workers")["workers"] if w["url"] == url), None)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._send(method, self.url + path, body)

    def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            url,
            data=data,
            headers={"Content-Type": "application/json", **self.config.engine.authorization},
            method=method,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=CALL_TIMEOUT_S) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {url}: HTTP {error.code}: {error.read().decode()[:500]}") from error
        except (OSError, http.client.HTTPException) as error:  # also an answer that breaks off
            raise RuntimeError(f"no answer to {method} {url}: {error}") from error
        return json.loads(content) if content else None

    def _launch(self, port: int) -> None:
        prometheus_port = free_port(self.host)
        self._process = SupervisedProcess(
            [
                *(sys.executable, "-m", "slime_rl.engine.launch_router"),
                *router_arguments(self.config, self.host, port, prometheus_port, self.disaggregated, self.shared),
                *key_file_arguments(self.config.engine.engine_api_key_file),
            ],
            program_environment(),
            self.log_path,
        )
        self._process.start()
        self._url = f"http://{self.host}:{port}"


class ModelRouter:
    """A shared router as the guard of one of its models knows it."""

    def __init__(self, router: RouterProcess, model: str) -> None:
        self.router, self.model = router, model
        self.is_alive, self.answers, self.end, self.restart = (
            router.is_alive,
            router.answers,
            router.end,
            router.restart,
        )
        self.remove_worker = router.remove_worker

    def add_worker(self, url: str) -> None:
        self.router.add_worker(url, model=self.model)


def router_arguments(
    config: Config, host: str, port: int, prometheus_port: int, disaggregated: bool = False, shared: bool = False
) -> list[str]:
    """Arguments of the router; the user's own come last and win."""
    health_timeout_s = max(1, math.floor(config.engine.engine_health_timeout_s / HEALTH_FAILURES) - HEALTH_INTERVAL_S)
    arguments = {
        "host": host,
        "port": port,
        "prometheus-host": host,
        "prometheus-port": prometheus_port,
        "policy": config.router.router_policy,
        "request-timeout-secs": math.ceil(config.rollout.request_timeout_s),
        "health-check-interval-secs": HEALTH_INTERVAL_S,
        "health-failure-threshold": HEALTH_FAILURES,
        "health-success-threshold": 1,
        "health-check-timeout-secs": health_timeout_s,
        "worker-startup-check-interval": 1,
        "log-level": "warn",
    }
    # Health checks take a dead engine out; the breaker would starve a healthy one for a minute after a few failures.
    switches = ["--disable-circuit-breaker"]
    if disaggregated:
        # Aborts are answered 500 there: the router would send them again. The client repeats the others.
        switches += ["--pd-disaggregation", "--disable-retries"]
    if shared:
        switches.append("--enable-igw")
    if config.router.router_policy == "manual":
        switches.append("--assignment-mode=min_load")  # where a new episode goes
    return [*(f"--{name}={value}" for name, value in arguments.items()), *switches, *config.router.router_args]
