"""One SGLang server: started, watched and stopped as a process tree that cannot outlive us."""

from __future__ import annotations

import http.client
import itertools
import logging
import signal
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_rl.config import Config
from slime_rl.engine.api_key import key_file_arguments
from slime_rl.engine.arguments import disaggregation_arguments, sglang_arguments
from slime_rl.engine.device import engine_device
from slime_rl.engine.environment import engine_environment
from slime_rl.engine.ports import free_port
from slime_rl.engine.process import SupervisedProcess
from slime_rl.engine.supervise import SGLANG_SHM_PREFIX
from slime_rl.engine.traced_requests import trace_arguments

logger = logging.getLogger(__name__)

PORT_TRIES = 3  # between our choice of a port and SGLang's bind another process may take it
PORT_TAKEN = ("address already in use", "EADDRINUSE")
GOES_ON_WITHOUT = (
    "error while attempting to bind on address"  # a prefill engine then waits for nobody at its other port
)
PROBE_TIMEOUT_S = 5.0
SUSPENDED_LOOK_S = 1.0  # between looks at whether a starting server is suspended


class EngineServer:
    """SGLang server number `index` of a run; its log is RUN_DIR/logs/engine_INDEX.log.

    It starts with the weights of --hf-checkpoint as version 0. `host` is the address it listens on; `gpus` are the
    indices of its GPUs on this node, without any it takes those that its owner sees. Of an engine over several nodes
    this is the part on node `node_rank`: that of rank 0 takes requests, the others (engine_INDEX_node_RANK.log) follow.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        run_dir: Path,
        gpus: Sequence[int] = (),
        *,
        host: str = "127.0.0.1",
        node_rank: int = 0,
    ) -> None:
        self.config, self.index, self.gpus, self.host = config, index, tuple(gpus), host
        self.node_rank, self.meeting = node_rank, ""
        self.name = f"{index}_node_{node_rank}" if node_rank else f"{index}"
        self.log_path = Path(run_dir) / "logs" / f"engine_{self.name}.log"
        self._process: SupervisedProcess | None = None
        self._url: str | None = None
        self._began = self._looked_at = self._worked_at = 0.0  # of the launch; when it was last seen not suspended

    @property
    def url(self) -> str:
        """`http://host:port` of the started server."""
        if self._url is None:
            raise RuntimeError(f"engine {self.index} is not started")
        return self._url

    @property
    def supervisor_pid(self) -> int | None:
        return None if self._process is None else self._process.supervisor_pid

    def start(self) -> None:
        """Start the server and wait until it serves.

        Raises:
            RuntimeError: it ended, or was not healthy within --start-timeout-s; with its last log lines.
        """
        deadline = time.monotonic() + self.config.cluster.start_timeout_s
        for attempt in range(PORT_TRIES):
            self.launch()
            while (serves := self.look()) is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if serves:
                return
            error = self.failure()
            self.stop()
            if attempt == PORT_TRIES - 1 or not self.port_was_taken():
                raise error
            logger.warning("engine %d: its port was taken by another process; choosing another", self.index)

    def launch(self, meeting: str = "") -> None:
        """Begin to start the server, as one of several nodes of an engine that find each other at `meeting`,
        `host:port` of the first. Then `look` until it serves."""
        self.stop()
        self.meeting = meeting
        self._began = self._looked_at = self._worked_at = time.monotonic()
        self._launch()

    def look(self) -> bool | None:
        """Whether the launched server serves; None while that is open. It has failed when its process ended, goes on
        without one of its ports, or was suspended for --engine-health-timeout-s: see `failure`."""
        now = time.monotonic()
        if not self.is_alive():
            return False
        if answers(f"{self.url}/health"):
            if GOES_ON_WITHOUT in self.log_text():
                return False
            logger.info("engine %d serves at %s after %.1f s", self.index, self._url, now - self._began)
            return True
        if now - self._looked_at > SUSPENDED_LOOK_S:
            self._looked_at = now
            if self._process is not None and not self._process.is_suspended():
                self._worked_at = now
        return False if now - self._worked_at > self.config.engine.engine_health_timeout_s else None

    def is_alive(self) -> bool:
        """Whether the server's process runs; says nothing about whether it answers."""
        return self._process is not None and self._process.is_running()

    def end_message(self) -> str | None:
        """How the server ended, with the end of its log; None while its process runs."""
        if self._process is None:
            return "is not started"
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by signal {code - 128} ({_signal_name(code - 128)})" if code > 128 else f"exited with {code}"
        lines = "\n  ".join(useful_lines(self.log_text(), 4))
        return f"{how}; the end of {self.log_path}:\n  {lines}"

    def restart(self) -> None:
        """End what is left of the server and start a new one, with the weights of --hf-checkpoint as version 0, at
        another port; the log so far is kept. Raises as `start` does."""
        self.stop()
        self.keep_log()
        self.start()

    def keep_log(self) -> None:
        """Name the log so far engine_INDEX.N.log, so that the next start does not replace it."""
        if self.log_path.exists():  # also when another object wrote it: a lost Ray worker's
            kept = (self.log_path.with_suffix(f".{number}.log") for number in itertools.count(1))
            self.log_path.replace(next(path for path in kept if not path.exists()))

    def stop(self, grace_s: float = 0.2) -> None:
        """End the server and all its processes. Idempotent.

        SGLang needs 5 s to end by itself and tidies nothing that we do not, so there is next to no grace.
        """
        if self._process is not None:
            self._process.stop(grace_s)
            self._process = None
        self._url = None

    def port_was_taken(self) -> bool:
        """Whether a port was free when it was chosen and taken when the server wanted it, so that another may do."""
        log = self.log_text()
        return any(text in log for text in PORT_TAKEN)

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _launch(self) -> None:
        device = engine_device(self.config.cluster.device)
        port = free_port(self.host)
        kind = "cpu-seeded" if self.config.train.deterministic else "cpu"
        key = key_file_arguments(self.config.engine.engine_api_key_file)
        if device == "cuda":
            kind = "cuda"
        trace = trace_arguments(self.config, self.log_path.stem)
        is_plain = device == "cuda" and not key and not trace
        program = ["sglang.launch_server"] if is_plain else ["slime_rl.engine.launch_engine", "serve", kind]
        arguments = [*sglang_arguments(self.config, self.index, device, self.host, port), *key, *trace]
        arguments += disaggregation_arguments(self.config, device, self.host)
        if self.meeting:
            nodes = self.config.cluster.nodes_per_engine
            arguments += [f"--nnodes={nodes}", f"--node-rank={self.node_rank}", f"--dist-init-addr={self.meeting}"]
        self._process = SupervisedProcess(
            [sys.executable, "-m", *program, *arguments],
            engine_environment(device, self.gpus, self.config.engine.engine_threads, self._shards())
            | {"SGLANG_HOST_IP": self.host},
            self.log_path,
            shm_prefix=SGLANG_SHM_PREFIX,
        )
        self._process.start()
        if key:
            self.log_path.chmod(0o600)  # SGLang prints its arguments
        self._url = f"http://{self.host}:{port}"

    def _shards(self) -> Sequence[int]:
        cluster = self.config.cluster
        each = cluster.engine_gpus_on_node
        return (
            range(self.node_rank * each, (self.node_rank + 1) * each) if cluster.rollout_num_gpus_per_engine > 1 else ()
        )

    def failure(self) -> RuntimeError:
        """Why the launched server does not serve."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            what = f"ended while it started, exit code {code}"
        elif self._process.is_suspended():
            what = "was suspended (SIGSTOP) while it started"
        elif GOES_ON_WITHOUT in self.log_text():
            what = "has lost one of its ports to another process"
        else:
            what = f"was not healthy within --start-timeout-s {self.config.cluster.start_timeout_s:g}"
        lines = "\n  ".join(useful_lines(self.log_text()))
        return RuntimeError(f"engine {self.index} {what}; the end of {self.log_path}:\n  {lines}")


def answers(url: str, timeout_s: float = PROBE_TIMEOUT_S, headers: Mapping[str, str] | None = None) -> bool:
    """Whether a GET of `url` is answered with success. Proxies of the environment are not asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout_s) as answer:
            answer.read()
            return True
    except (OSError, http.client.HTTPException):  # URLError, refused, reset and timed-out connections are OSErrors
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def useful_lines(log: str, num_lines: int = 12) -> list[str]:
    """The lines of a log that say what went wrong: the messages of the first two exceptions, then the last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    causes: list[str] = []
    in_traceback = False
    for line in lines:
        if "Traceback (most recent call last)" in line:
            in_traceback = True
        elif in_traceback and not line.startswith((" ", "\t")):
            causes.append(line)
            in_traceback = False
    last = lines[-num_lines:]
    return [cause for cause in dict.fromkeys(causes[:2]) if cause not in last] + last
