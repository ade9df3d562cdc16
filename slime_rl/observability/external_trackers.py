"""Other programs that metrics can go to, by `--trackers`: Weights & Biases, MLflow, trackio, a Prometheus endpoint.

Each is one small class around an optional package, which is imported when it is asked for. Where its server is and how
to log in are the package's own settings (WANDB_*, MLFLOW_TRACKING_URI, TRACKIO_*). A run that is resumed goes on in the
same entry there: its id is kept in RUN_DIR/trackers.json. One that fails is marked as failed.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from slime_rl.config import Config
from slime_rl.observability.background import InBackground
from slime_rl.observability.metrics import find_metric

IDS_FILE = "trackers.json"
SERVER_TIMEOUT_S = 20.0


def _package(name: str, tracker: str) -> ModuleType:
    """An optional package.

    Raises:
        ValueError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--trackers {tracker} needs the package {name}: pip install {name} ({error})") from error


def check_trackers(config: Config) -> None:
    """Import what --trackers names and see whether it can log in, before anything starts.

    Raises:
        ValueError: a package that is not installed, nobody logged in, a server that does not answer, an address that
            is taken, a damaged trackers.json.
    """
    for name in config.logging.trackers:
        _package(PACKAGES[name], name)
        if name in CHECKS:
            _told(name, partial(CHECKS[name], config))
    goes_on = config.checkpoint.load is not None and not config.checkpoint.finetune
    if goes_on and config.logging.trackers:
        _known_ids(config)


def _told(name: str, call: Callable[[], Any]) -> Any:
    """`call()`, whose errors name the flag.

    Raises:
        ValueError: whatever went wrong.
    """
    try:
        return call()
    except Exception as error:  # each package has kinds of its own
        if isinstance(error, ValueError) and str(error).startswith("--"):
            raise  # one of ours
        raise ValueError(f"--trackers {name}: {' '.join(str(error).split())} ({type(error).__name__})") from error


def _check_wandb(config: Config) -> None:
    """Asks for a key where there is a terminal. Engines take minutes to start; without a key they start for nothing."""
    wandb: Any = _package("wandb", "wandb")
    if wandb.setup().settings.mode not in ("online", "shared"):
        return
    try:
        wandb.login()
    except wandb.errors.UsageError as error:
        raise ValueError(
            f"--trackers wandb: {error} Or set WANDB_API_KEY, or WANDB_MODE=offline to keep its files in the run folder"
        ) from error


def _check_mlflow(config: Config) -> None:
    """The package itself tries for minutes to reach a server that is not there."""
    mlflow: Any = _package("mlflow", "mlflow")
    address = str(mlflow.get_tracking_uri())
    if address.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=SERVER_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # somebody is there
        except OSError as error:
            raise ValueError(f"--trackers mlflow: MLFLOW_TRACKING_URI {address} does not answer: {error}") from error
    else:
        mlflow.MlflowClient().search_experiments(max_results=1)


def _prometheus_address(config: Config) -> tuple[str, int]:
    """Host and port; an IPv6 address may stand in brackets."""
    host, _, port = config.logging.prometheus_address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextmanager
def _listening(config: Config) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        address = config.logging.prometheus_address
        raise ValueError(f"--prometheus-address {address}: cannot listen there: {error}") from error


def _check_prometheus(config: Config) -> None:
    host, port = _prometheus_address(config)
    with _listening(config):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does it
            probe.bind(address)
            probe.listen()


CHECKS: dict[str, Callable[[Config], None]] = {
    "wandb": _check_wandb,
    "mlflow": _check_mlflow,
    "prometheus": _check_prometheus,
}


class WandbTracker:
    """Weights & Biases. Steps are a metric of their own there, since a resumed run logs some of them again."""

    def __init__(self, config: Config, run_id: str | None) -> None:
        wandb: Any = _package("wandb", "wandb")
        self._run = wandb.init(
            project=config.logging.tracker_project,
            name=config.logging.tracker_run or config.run_dir.name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(config.run_dir),
            config=flat_config(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow; MLFLOW_TRACKING_URI names the server or file."""

    def __init__(self, config: Config, run_id: str | None) -> None:
        self._mlflow: Any = _package("mlflow", "mlflow")
        self._mlflow.set_experiment(config.logging.tracker_project)
        name = config.logging.tracker_run or config.run_dir.name
        self._run = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else name)
        self.run_id = str(self._run.info.run_id)
        if run_id is None:
            self._mlflow.log_params({key: str(value)[:500] for key, value in flat_config(config).items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # A name may hold letters, digits and a few signs there; NaN is refused by some of its stores.
        values = {re.sub(r"[^\w\-./ ]", "_", n): float(v) for n, v in metrics.items() if math.isfinite(v)}
        self._mlflow.log_metrics(values, step=step)

    def close(self, failed: bool = False) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class TrackioTracker:
    """trackio: a local SQLite file (TRACKIO_DIR) that `trackio show` displays."""

    def __init__(self, config: Config, run_id: str | None) -> None:
        trackio: Any = _package("trackio", "trackio")
        self.run_id = run_id or config.logging.tracker_run or config.run_dir.name
        self._run = trackio.init(
            project=config.logging.tracker_project,
            name=self.run_id,
            config=flat_config(config),
            resume="allow" if run_id else "never",
            embed=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool = False) -> None:
        self._run.finish()


class PrometheusTracker:
    """The newest value of every metric at http://HOST:PORT/metrics, with its documented meaning as help text."""

    def __init__(self, config: Config, run_id: str | None) -> None:
        prometheus: Any = _package("prometheus_client", "prometheus")
        host, port = _prometheus_address(config)
        self.run_id = ""
        self._registry = prometheus.CollectorRegistry()
        self._make_gauge = prometheus.Gauge
        self._labels = {"run": config.logging.tracker_run or config.run_dir.name}
        self._gauges: dict[str, Any] = {}
        self._names: set[str] = set()
        with _listening(config):
            self._server, _ = prometheus.start_http_server(port, addr=host, registry=self._registry)
        self.port = int(self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": step, **metrics}.items():
            self._gauge(name).labels(**self._labels).set(float(value))

    def close(self, failed: bool = False) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            known = find_metric(name)
            about = f"{known.meaning} Unit: {known.unit}; {known.reduction}." if known else name
            safe = _plain(name)
            tried = (safe if count == 1 else f"{safe}_{count}" for count in itertools.count(1))
            unique = next(each for each in tried if each not in self._names)  # a-b, a_b and a_b_2 are three metrics
            self._names.add(unique)
            self._gauges[name] = self._make_gauge(unique, about, list(self._labels), registry=self._registry)
        return self._gauges[name]


def _plain(name: str) -> str:
    """As Prometheus may call it."""
    return "slime_rl_" + re.sub(r"\W", "_", name, flags=re.ASCII)


PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "prometheus": "prometheus_client"}
TRACKERS: dict[str, Callable[[Config, str | None], Any]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "prometheus": PrometheusTracker,
}
AT_ONCE = ("prometheus",)  # logs to this process; the others may be slow, or away


def open_trackers(config: Config, *, resume: bool) -> list[Any]:
    """The trackers of --trackers; those already open are closed when one fails.

    Raises:
        ValueError: a package that is not installed, an address that cannot be used, whatever the package says.
    """
    config.run_dir.mkdir(parents=True, exist_ok=True)
    path = config.run_dir / IDS_FILE
    ids = _known_ids(config) if resume else {}
    opened: dict[str, Any] = {}
    try:
        for name in config.logging.trackers:
            make = partial(_told, name, partial(TRACKERS[name], config, ids.get(name)))
            opened[name] = make() if name in AT_ONCE else InBackground(name, make)
    except BaseException:
        for tracker in opened.values():
            tracker.close(failed=True)
        raise
    if opened:
        aside = path.with_name(f"{path.name}.new")  # a kill leaves the whole old one or the whole new one
        aside.write_text(json.dumps({name: tracker.run_id for name, tracker in opened.items()}) + "\n")
        os.replace(aside, path)
    return list(opened.values())


def _known_ids(config: Config) -> dict[str, str]:
    """Tracker -> id of this run's entry there.

    Raises:
        ValueError: the file that holds them is damaged.
    """
    path = config.run_dir / IDS_FILE
    if not path.is_file():
        return {}
    try:
        ids = json.loads(path.read_text())
    except ValueError as error:
        ids = str(error)
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise ValueError(
            f"{path}: must be an object of tracker names and ids of its runs, got {ids!r}; remove it to begin new ones"
        )
    return ids


def flat_config(config: Config) -> dict[str, Any]:
    """flag name -> value of every flag, as these programs show settings."""
    sections: dict[str, dict[str, Any]] = dataclasses.asdict(config)
    return {name: value for section in sections.values() for name, value in section.items()}
