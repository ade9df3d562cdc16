"""Each tracker against the real package, offline; skipped where the package is not installed."""

from __future__ import annotations

import socket
import sqlite3
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.observability import external_trackers
from slime_rl.observability.external_trackers import check_trackers, flat_config, open_trackers
from slime_rl.observability.tracker import make_trackers

STEPS = {0: {"train/loss": 2.0, "eval/held out/accuracy": 0.25}, 1: {"train/loss": 1.5, "train/lr": float("nan")}}


def log_steps(tracker: Any, steps: dict[int, dict[str, float]]) -> None:
    for step, metrics in steps.items():
        tracker.log(step, metrics)
    tracker.close()


def test_prometheus_serves_the_newest_values_with_their_meaning(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    config = make_config(tmp_path, "--trackers", "prometheus", "--prometheus-address", "127.0.0.1:0")
    tracker = open_trackers(config, resume=False)[0]
    tracker.log(0, STEPS[0])
    tracker.log(1, STEPS[1] | {"eval/held-out/accuracy": 0.5, "mine/gr\u00f6\u00dfe": 3.0})
    text = urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=120).read().decode()
    tracker.close()
    assert 'slime_rl_train_loss{run="run"} 1.5' in text
    assert 'slime_rl_eval_held_out_accuracy{run="run"} 0.25' in text
    assert 'slime_rl_eval_held_out_accuracy_2{run="run"} 0.5' in text and 'slime_rl_mine_gr__e{run="run"} 3.0' in text
    assert 'slime_rl_train_lr{run="run"} NaN' in text
    assert 'slime_rl_step{run="run"} 1.0' in text
    assert "# HELP slime_rl_train_loss What the optimizer minimises" in text


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = make_config(tmp_path, "--trackers", "prometheus", "--prometheus-address", address)
        with pytest.raises(ValueError, match=f"--prometheus-address {address}: cannot listen there"):
            open_trackers(config, resume=False)


def test_wandb_offline_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    config = make_config(tmp_path, "--trackers", "wandb", "--tracker-project", "tests")
    first = open_trackers(config, resume=False)[0]
    log_steps(first, STEPS)
    again = open_trackers(config, resume=True)[0]
    log_steps(again, {1: {"train/loss": 1.0}})
    assert again.run_id == first.run_id
    written = list(config.run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert written and all(b"train/loss" in path.read_bytes() for path in written)


def test_mlflow_keeps_values_by_step_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    config = make_config(tmp_path, "--trackers", "mlflow")
    first = open_trackers(config, resume=False)[0]
    log_steps(first, STEPS)
    again = open_trackers(config, resume=True)[0]
    log_steps(again, {2: {"train/loss": 1.0}})
    assert again.run_id == first.run_id
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        seed = connection.execute("select value from params where key = 'seed'").fetchall()
    assert rows == [(0, 2.0), (1, 1.5), (2, 1.0)]
    assert seed == [("1234",)]


def test_trackio_writes_its_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    config = make_config(tmp_path, "--trackers", "trackio", "--tracker-run", "one")
    log_steps(open_trackers(config, resume=False)[0], STEPS)
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("one", 0), ("one", 1)]
    assert "2.0" in str(rows[0][2])


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(external_trackers.PACKAGES, "wandb", "no_such_package")
    with pytest.raises(ValueError, match=r"--trackers wandb needs .*pip install 'slime_rl\[wandb\]'"):
        check_trackers(make_config(tmp_path, "--trackers", "wandb"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trackers", "comet"], "--trackers takes wandb, mlflow, trackio, prometheus, got 'comet'"),
        (["--trackers", "wandb", "wandb"], "--trackers must name each once"),
        (["--prometheus-address", "9400"], "--prometheus-address must be HOST:PORT"),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, *flags)


def test_settings_are_shown_by_flag_name(tmp_path: Path) -> None:
    shown = flat_config(make_config(tmp_path, "--lr", "0.5"))
    assert shown["lr"] == 0.5 and shown["seed"] == 1234


def test_a_run_logs_to_them_beside_its_own_file(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    config = make_config(tmp_path, "--trackers", "prometheus", "--prometheus-address", "127.0.0.1:0")
    with make_trackers(config) as trackers:
        trackers.log(0, {"train/loss": 1.0})
    assert (config.run_dir / "metrics.jsonl").read_text().count("train/loss") == 1
    assert (config.run_dir / "trackers.json").is_file()
