"""Other programs that metrics can go to, by `--trackers`: Weights & Biases, MLflow, trackio, a Prometheus endpoint.

Each is one small class around an optional package, which is imported when it is asked for. Where its server is and how
to log in are the package's own settings (WANDB_*, MLFLOW_TRACKING_URI, TRACKIO_*). A run that is resumed goes on in the
same entry there: its id is kept in RUN_DIR/trackers.json. One that fails is marked as failed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
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
        ValueError: a package that is not installed, nobody logged in, a server that does not answer.
    """
    for name in config.logging.trackers:
        _package(PACKAGES[name], name)
        if name in CHECKS:
            _told(name, CHECKS[name])


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


def _check_wandb() -> None:
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


def _check_mlflow() -> None:
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


CHECKS: dict[str, Callable[[], None]] = {"wandb": _check_wandb, "mlflow": _check_mlflow}


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
        host, _, port = config.logging.prometheus_address.rpartition(":")
        self.run_id = ""
        self._registry = prometheus.CollectorRegistry()
        self._make_gauge = prometheus.Gauge
        self._labels = {"run": config.logging.tracker_run or config.run_dir.name}
        self._gauges: dict[str, Any] = {}
        try:
            self._server, _ = prometheus.start_http_server(int(port), addr=host, registry=self._registry)
        except OSError as error:
            raise ValueError(f"--prometheus-address {host}:{port}: cannot listen there: {error}") from error
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
            same = sum(_plain(other) == safe for other in self._gauges)
            unique = safe if same == 0 else f"{safe}_{same + 1}"  # a-b and a_b are two metrics
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
    ids: dict[str, str] = json.loads(path.read_text()) if resume and path.is_file() else {}
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
        path.write_text(json.dumps({name: tracker.run_id for name, tracker in opened.items()}) + "\n")
    return list(opened.values())


def flat_config(config: Config) -> dict[str, Any]:
    """flag name -> value of every flag, as these programs show settings."""
    sections: dict[str, dict[str, Any]] = dataclasses.asdict(config)
    return {name: value for section in sections.values() for name, value in section.items()}
