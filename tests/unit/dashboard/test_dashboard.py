"""The dashboard over HTTP, on a run folder written by the run's own writers; drawn by a real browser if there is one.

CHROMIUM names the browser; without it `chromium` or `chromium-headless-shell` on the PATH is taken.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.dashboard.__main__ import main
from slime_rl.dashboard.app import make_app
from slime_rl.dashboard.runs import find_runs
from slime_rl.observability.trace import Trace
from slime_rl.observability.tracker import make_trackers
from slime_rl.types import Sample, Status

ATTACK = "<img src=x onerror=alert(1)>"


def make_sample(index: int, reward: float) -> Sample:
    sample = Sample(index=index, group_index=7, rollout_id=index, prompt=f"1+1= {ATTACK}", label="2")
    sample.set_prompt_tokens([1, 2, 3])
    sample.append_tokens([4, 5], log_probs=[-0.1, -2.5], versions=[0, 1])
    sample.append_tokens([6], trained=False)
    sample.response, sample.reward, sample.status = ATTACK, reward, Status.COMPLETED
    return sample


def write_run(tmp_path: Path) -> Path:
    """Four steps, two samples each, and a trace."""
    config = make_config(tmp_path, "--log-samples", "2", "--lr", "0.125")
    with make_trackers(config) as trackers:
        for step in range(4):
            metrics = {"train/loss": 1.0 / (step + 1), "train/lr": float("nan"), "buffer/reserved": 2.0}
            metrics |= {"timing_s/rollout": 2.4, "timing_s/train": 0.5, "timing_s/other": 0.1, "perf/step_s": 3.0}
            metrics |= {"rollout/staleness_max": 1.0}
            trackers.log(step, metrics)
            samples = [make_sample(2 * step, 1.0), make_sample(2 * step + 1, 0.0)]
            trackers.log_samples(step, samples, [["the", "<b>", "!"]] * 2)
    trace = Trace(config.run_dir / "trace" / "rollout.jsonl")
    trace.add("requests", "request", 10.0, 10.5, {"tokens": 3})
    trace.add("requests", "request", 10.1, 10.4)
    trace.close()
    return config.run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def url(run_dir: Path) -> Iterator[str]:
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = make_app(find_runs([run_dir]), ["127.0.0.1", "localhost"])
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def test_overview_has_state_flags_and_advice(url: str) -> None:
    found = get(f"{url}/api/runs/0/overview")
    assert found["steps"] == 4 and found["state"] == "running"
    assert ["--lr", 0.125] in found["flags"] and "--lr 0.125" in found["command"]
    assert any("trainers idle 80%" in sentence for sentence in found["advice"])


def test_metrics_have_points_and_their_documented_meaning(url: str) -> None:
    metrics = get(f"{url}/api/runs/0/metrics")
    assert metrics["train/loss"]["steps"] == [0, 1, 2, 3]
    assert metrics["train/loss"]["values"][1] == 0.5
    assert metrics["train/loss"]["meaning"].startswith("What the optimizer minimises")
    assert metrics["train/lr"]["values"] == []  # not a number: no point, and valid JSON


def test_samples_come_by_group_with_tokens(url: str) -> None:
    found = get(f"{url}/api/runs/0/samples?step=2")
    assert found["steps"] == [0, 1, 2, 3]
    group = found["groups"][0]
    assert group["mean"] == 0.5 and [s["reward_minus_mean"] for s in group["samples"]] == [0.5, -0.5]
    sample = group["samples"][0]
    assert sample["tokens"] == ["the", "<b>", "!"]
    assert sample["log_probs"][:2] == [-0.1, -2.5]
    assert sample["loss_mask"] == [1, 1, 0]
    assert sample["weight_versions_by_token"][:2] == [0, 1]
    assert get(f"{url}/api/runs/0/samples")["step"] == 3


def test_timeline_puts_overlapping_requests_into_lanes(url: str) -> None:
    found = get(f"{url}/api/runs/0/timeline")
    assert [bar[0] for bar in found["tracks"][0]["bars"]] == [0, 1]
    assert found["seconds"] == pytest.approx(0.5)


def test_a_live_run_shows_new_steps(url: str, run_dir: Path) -> None:
    get(f"{url}/api/runs/0/metrics")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time_s": 9, "train/loss": 0.125}\n')
    os.utime(run_dir / "metrics.jsonl", (time.time() + 2, time.time() + 2))
    assert get(f"{url}/api/runs/0/metrics")["train/loss"]["values"][-1] == 0.125


def test_what_is_not_there_is_an_answer_and_not_a_crash(url: str, run_dir: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{url}/api/runs/3/metrics")
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{url}/api/runs/0/metrics")
    assert caught.value.code == 409 and "metrics.jsonl" in json.loads(caught.value.read())["error"]


def test_pages_of_other_sites_cannot_read_runs_through_the_users_browser(url: str) -> None:
    request = urllib.request.Request(f"{url}/api/runs", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=20)


def test_a_folder_of_runs_stands_for_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
        (tmp_path / name / "run").rename(tmp_path / f"run_{name}")
    assert [run.folder.name for run in find_runs([tmp_path])] == ["run_a", "run_b"]
    assert main([str(tmp_path / "nothing")]) == 2
    assert "must be the folder of a run" in capsys.readouterr().err


def browser() -> str:
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-headless-shell"):
        if name and shutil.which(name):
            return name
    pytest.skip("no Chromium: install it, or set CHROMIUM")


@pytest.mark.parametrize(
    ("tab", "shown"),
    [
        ("overview", ["trainers idle 80%", "train/loss", "--lr 0.125", "<svg"]),
        ("time", ["rollout", "requests", "<rect"]),
        ("data", ["Buffer ledger", "reserved"]),
        ("rollouts=2", ["group 7", "mean reward of those shown 0.5", "&lt;b&gt;", "hsl("]),
        ("compare", ["legend", "perf/step_s"]),
    ],
)
def test_a_browser_draws_every_tab_and_runs_nothing_from_a_sample(url: str, tab: str, shown: list[str]) -> None:
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1500", "--dump-dom"]
    page = subprocess.run([*command, f"{url}/#{tab}"], capture_output=True, text=True, timeout=120).stdout
    for text in shown:
        assert text in page, page[-3000:]
    assert "<img" not in page
