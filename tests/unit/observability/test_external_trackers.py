"""Each tracker against the real package, offline; skipped where the package is not installed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
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
        for call in (lambda: open_trackers(config, resume=False), lambda: check_trackers(config)):
            with pytest.raises(ValueError, match=f"--prometheus-address {address}: cannot listen there"):
                call()
    check_trackers(config)


def test_an_ipv6_address_may_stand_in_brackets(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    if not Path("/proc/net/if_inet6").is_file() or "00000001 " not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 loopback here")
    config = make_config(tmp_path, "--trackers", "prometheus", "--prometheus-address", "[::1]:0")
    check_trackers(config)
    tracker = open_trackers(config, resume=False)[0]
    assert urllib.request.urlopen(f"http://[::1]:{tracker.port}/metrics", timeout=120).status == 200
    tracker.close()


def test_names_that_prometheus_cannot_tell_apart_get_numbers_that_are_free(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    config = make_config(tmp_path, "--trackers", "prometheus", "--prometheus-address", "127.0.0.1:0")
    tracker = open_trackers(config, resume=False)[0]
    tracker.log(0, {"a-b": 1.0, "a/b": 2.0, "a_b_2": 3.0, "a_b": 4.0})
    text = urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=120).read().decode()
    tracker.close()
    values = [line for line in text.splitlines() if line.startswith("slime_rl_a_b")]
    assert [line.split("{")[0] for line in values] == [f"slime_rl_a_b{end}" for end in ("", "_2", "_2_2", "_3")]
    assert [line.split()[-1] for line in values] == ["1.0", "2.0", "3.0", "4.0"]


@pytest.mark.parametrize("content", ["", '{"prometheus": ', "[]", '{"wandb": 3}'])
def test_damaged_ids_are_named_before_anything_starts(tmp_path: Path, content: str) -> None:
    pytest.importorskip("prometheus_client")
    config = make_config(tmp_path, "--trackers", "prometheus", "--prometheus-address", "127.0.0.1:0")
    open_trackers(config, resume=False)[0].close()
    config = config.with_sections(checkpoint=dataclasses.replace(config.checkpoint, load=str(tmp_path)))
    check_trackers(config)
    (config.run_dir / "trackers.json").write_text(content)
    for call in (lambda: open_trackers(config, resume=True), lambda: check_trackers(config)):
        with pytest.raises(ValueError, match=r"trackers\.json: must be an object of tracker names and ids.*remove it"):
            call()


def wandb_records(path: Path) -> Iterator[Any]:
    """What an offline file of W&B holds: protocol buffers in LevelDB's log format, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_lines(records: list[Any]) -> list[dict[str, Any]]:
    items = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    lines = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in line} for line in items]
    return [{name: value for name, value in line.items() if name[0] != "_"} for line in lines]


def test_wandb_offline_keeps_values_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    config = make_config(tmp_path, "--trackers", "wandb", "--tracker-project", "tests", "--lr", "0.5")
    check_trackers(config)  # no key is needed
    first = open_trackers(config, resume=False)[0]
    log_steps(first, STEPS)
    again = open_trackers(config, resume=True)[0]
    again.log(2, {"train/loss": 1.0})
    again.close(failed=True)
    assert again.run_id == first.run_id
    files = sorted(config.run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    before, after = (list(wandb_records(path)) for path in files)
    assert [line["step"] for line in wandb_lines(before)] == [0, 1] and wandb_lines(before)[0] == {
        "step": 0,
        **STEPS[0],
    }
    assert math.isnan(wandb_lines(before)[1]["train/lr"])
    assert wandb_lines(after) == [{"step": 2, "train/loss": 1.0}]
    run = next(record.run for record in before if record.WhichOneof("record_type") == "run")
    settings = {update.key: update.value_json for update in run.config.update}
    assert (run.project, run.display_name, settings["lr"]) == ("tests", "run", "0.5")
    assert [record.exit.exit_code for record in (before[-1], after[-1])] == [0, 1]


def test_wandb_without_a_key_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "none"),
        "WANDB_CONFIG_DIR": str(tmp_path),
    }
    code = "from slime_rl.observability.external_trackers import CHECKS; CHECKS['wandb'](None)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "ValueError: --trackers wandb: No API key configured" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr


def test_mlflow_keeps_values_by_step_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    config = make_config(tmp_path, "--trackers", "mlflow")
    first = open_trackers(config, resume=False)[0]
    log_steps(first, STEPS)
    again = open_trackers(config, resume=True)[0]
    again.log(2, {"train/loss": 1.0, "mine/odd (x)": 1.0})
    again.close(failed=True)
    assert again.run_id == first.run_id
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        seed = connection.execute("select value from params where key = 'seed'").fetchall()
        runs = connection.execute("select name, status from runs").fetchall()
        names = {name for (name,) in connection.execute("select key from metrics")}
    assert runs == [("run", "FAILED")]
    assert names == {"train/loss", "eval/held out/accuracy", "mine/odd _x_"}
    assert rows == [(0, 2.0), (1, 1.5), (2, 1.0)]
    assert seed == [("1234",)]


def test_an_mlflow_server_that_is_away_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    config = make_config(tmp_path, "--trackers", "mlflow")
    with pytest.raises(ValueError, match=r"--trackers mlflow: .*http://127\.0\.0\.1:9 does not answer"):
        check_trackers(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "odd://nothing")
    with pytest.raises(ValueError, match=r"--trackers mlflow: .*odd"):
        check_trackers(config)


def test_trackio_writes_its_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    config = make_config(tmp_path, "--trackers", "trackio", "--tracker-run", "one")
    log_steps(open_trackers(config, resume=False)[0], STEPS)
    log_steps(open_trackers(config, resume=True)[0], {2: {"train/loss": 1.0}})
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
        runs = connection.execute("select count(distinct run_id) from metrics").fetchone()
        settings = json.loads(connection.execute("select config from configs").fetchone()[0])
    assert [(name, step) for name, step, _ in rows] == [("one", 0), ("one", 1), ("one", 2)] and runs == (1,)
    assert json.loads(rows[0][2]) == STEPS[0] and json.loads(rows[1][2]) == {"train/loss": 1.5, "train/lr": "NaN"}
    assert settings["seed"] == 1234


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(external_trackers.PACKAGES, "wandb", "no_such_package")
    with pytest.raises(ValueError, match="--trackers wandb needs the package no_such_package: pip install"):
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
