"""The dashboard over HTTP, on a run folder written by the run's own writers."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dashboard_runs import write_run
from dashboard_site import get

from slime_rl.dashboard.__main__ import main
from slime_rl.dashboard.runs import Run, Runs, as_json
from slime_rl.observability.report import write_report


def error_of(url: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url)
    return caught.value.code, json.loads(caught.value.read())["error"]


def test_overview_has_state_flags_and_advice(url: str) -> None:
    found = get(f"{url}/api/runs/0/overview")
    assert found["steps"] == 4 and found["state"] == "running" and found["notes"] == []
    assert ["--lr", 0.125] in found["flags"] and "--lr 0.125" in found["command"]
    assert any("trainers idle 80%" in sentence for sentence in found["advice"])


def test_advice_knows_that_a_fully_asynchronous_run_generates_ahead_already(tmp_path: Path) -> None:
    [sentence] = Run(write_run(tmp_path, "--fully-async")).overview()["advice"]
    assert "trainers idle" in sentence and "--rollout-ahead" not in sentence


def test_metrics_have_points_and_their_documented_meaning(url: str) -> None:
    found = get(f"{url}/api/runs/0/metrics")
    loss = found["metrics"]["train/loss"]
    assert found["axes"][loss["axis"]]["steps"] == [0, 1, 2, 3] and len(found["axes"][loss["axis"]]["times"]) == 4
    assert loss["values"][1] == 0.5
    assert loss["meaning"].startswith("What the optimizer minimises")
    assert found["metrics"]["train/lr"]["values"] == []  # not a number: no point, and valid JSON


def test_samples_come_by_group_with_tokens_and_what_training_saw_of_them(url: str) -> None:
    found = get(f"{url}/api/runs/0/samples?step=2")
    assert found["steps"] == [0, 1, 2, 3] and found["num_groups"] == 2
    group = found["groups"][0]
    assert group["mean"] == 0.5 and [s["reward_minus_mean"] for s in group["samples"]] == [0.5, -0.5]
    sample = group["samples"][0]
    assert sample["tokens"] == ["the", "<b>", "!"] and sample["loss_mask"] == [1, 1, 0]
    assert sample["log_probs"][:2] == [-0.1, -2.5] and sample["weight_versions_by_token"][:2] == [0, 1]
    assert sample["train_log_probs"] == [-0.1, pytest.approx(-1.806853), None] and sample["advantages"][0] == 0.5
    assert get(f"{url}/api/runs/0/samples")["step"] == 3


def test_evaluation_samples_are_not_mixed_with_those_that_train(url: str) -> None:
    found = get(f"{url}/api/runs/0/samples?kind=evaluation")
    assert found["kinds"] == ["training", "evaluation"] and found["steps"] == [0]
    assert [len(group["samples"]) for group in found["groups"]] == [1]
    assert [len(g["samples"]) for g in get(f"{url}/api/runs/0/samples?step=0")["groups"]] == [2, 1]


def test_spread_is_that_of_a_steps_logged_samples(url: str) -> None:
    found = get(f"{url}/api/runs/0/spread?step=1")
    assert found["lengths"] == [3, 3, 3] and found["rewards"] == [1.0, 0.0, 1.0]
    assert found["ages"] == [[0, 3], [1, 3]]  # versions 1 and 0 in step 1; the last token was not sampled


def test_engines_have_faults_and_ends_of_logs(url: str) -> None:
    found = get(f"{url}/api/runs/0/engines")
    assert found["faults"] == ["2026-01-01 engine 0 is down: it has ended"]
    assert found["logs"] == [{"name": "engine_0.log", "tail": "The server is fired up\n"}]


def test_a_live_run_shows_new_steps_and_what_is_unchanged_is_not_sent_again(url: str, run_dir: Path) -> None:
    with urllib.request.urlopen(f"{url}/api/runs/0/metrics", timeout=120) as answer:
        tag = answer.headers["ETag"]
    request = urllib.request.Request(f"{url}/api/runs/0/metrics", headers={"If-None-Match": tag})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(request, timeout=120)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time_s": 9, "train/loss": 0.125}\n')
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.loads(answer.read())["metrics"]["train/loss"]["values"][-1] == 0.125


def test_parts_that_are_asked_for_at_once_do_not_read_a_line_twice(url: str, run_dir: Path) -> None:
    parts = ["metrics", "samples", "spread", "overview"] * 4
    for step in range(4, 8):
        with (run_dir / "samples.jsonl").open("a") as file:
            file.writelines(f'{{"step": {step}, "group_index": {i}}}\n' for i in range(2000))
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(lambda part: get(f"{url}/api/runs/0/{part}"), parts))
        assert get(f"{url}/api/runs/0/samples")["num_samples"] == 2000


def test_what_is_not_there_is_an_answer_and_not_a_crash(url: str, run_dir: Path) -> None:
    assert error_of(f"{url}/api/runs/3/metrics") == (404, "there is no run 3 of 1")
    assert error_of(f"{url}/api/runs/0/samples?step=one") == (409, "step must be a whole number, got 'one'")
    assert "order must be one of as trained" in error_of(f"{url}/api/runs/0/samples?order=odd")[1]
    assert "from and to must be seconds, got '1' and 'nan'" in error_of(f"{url}/api/runs/0/timeline?from=1&to=nan")[1]
    shutil.rmtree(run_dir)
    assert get(f"{url}/api/runs")[0]["state"] == "missing"
    for part in ("overview", "metrics"):
        assert error_of(f"{url}/api/runs/0/{part}") == (409, f"{run_dir} is not there any more")
    for part in ("samples", "spread", "timeline", "engines"):  # empty, as of a run that has not come so far
        assert get(f"{url}/api/runs/0/{part}") is not None


def test_numbers_that_json_does_not_know_become_null() -> None:
    assert json.loads(as_json({"a": [float("nan"), 1.5, {"b": float("inf")}]})) == {"a": [None, 1.5, {"b": None}]}


def test_pages_of_other_sites_cannot_read_runs_through_the_users_browser(url: str) -> None:
    request = urllib.request.Request(f"{url}/api/runs", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=120)


def test_the_page_lets_nothing_run_that_is_not_its_own(url: str) -> None:
    with urllib.request.urlopen(url, timeout=120) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "script-src" not in policy  # so scripts are those of 'self' alone


def test_a_folder_of_runs_stands_for_its_runs_and_those_that_come_later(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name).rename(tmp_path / f"run_{name}")
        shutil.rmtree(tmp_path / name)
    runs = Runs([tmp_path, tmp_path / "run_b"])
    assert runs.names() == ["run_a", "run_b"]
    shutil.copytree(tmp_path / "run_a", tmp_path / "run_0")
    assert [run.folder.name for run in runs.look()] == ["run_a", "run_b", "run_0"]  # each keeps its number


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    assert Runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")]).names() == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "nothing: must be the folder of a run, or hold such folders; it is not there"),
        (["empty"], "empty: must be the folder of a run, or hold such folders; it holds none"),
        (["file"], "file: must be the folder of a run, or hold such folders; it is a file"),
        (["run", "--port", "99999"], "--port must be 0 to 65535, got 99999"),
        (["run", "--port", "TAKEN"], "Address already in use; --port 0 takes a free one"),
        (["run", "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        ([], "the following arguments are required: RUN_DIR"),
        (["run", "--prot", "1"], "unrecognized arguments: --prot 1"),
        (["run", "--port", "x"], "argument --port: invalid int value: 'x'"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(
    tmp_path: Path, run_dir: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in words]
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("slime_rl.dashboard: ")


def age_metrics(run_dir: Path) -> None:
    old = time.time() - 3600
    os.utime(run_dir / "metrics.jsonl", (old, old))


def test_state_is_what_the_run_left_last(run_dir: Path) -> None:
    run = Run(run_dir)
    assert run.state == "running"
    age_metrics(run_dir)
    assert run.state == "stopped"
    (run_dir / "error.log").write_text("Traceback: engine lost\n")
    assert run.state == "failed" and "engine lost" in run.overview()["error"]
    (run_dir / "summary.json").write_text("{}")
    assert run.state == "finished"
    old = time.time() - 7200
    for name in ("summary.json", "error.log"):  # the run was continued, and then killed
        os.utime(run_dir / name, (old, old))
    assert run.state == "stopped"


def test_a_run_whose_step_takes_long_is_running_as_long_as_it_holds_its_folder(run_dir: Path) -> None:
    age_metrics(run_dir)
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Run(run_dir).state == "running"
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert Run(run_dir).state == "stopped"


def test_files_that_are_being_written_or_broken_leave_the_rest_readable(run_dir: Path) -> None:
    run = Run(run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 4, "train/loss": 0.1}\n{"step": 5, "train/lo')
    (run_dir / "config.json").write_text('{"train": {"num_st')
    found = run.overview()
    assert found["steps"] == 4 and found["flags"] == []
    assert "left out, not a JSON object with a step: line 6" in found["notes"][0]
    assert "config.json:1: not JSON" in found["notes"][1]
    assert run.metrics()["metrics"]["train/loss"]["values"] == [1.0, 0.5, 0.333333, 0.25, 0.1]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.05}\n')
    assert run.metrics()["metrics"]["train/loss"]["values"][-1] == 0.05


OTHER_FORMS = [
    ("config.json", '{"train": [1], "rollout": null}'),
    ("config.json", '{"train": {"num_steps": {}}, "asynchrony": {"fully_async": 1}, "engine": {"sglang_args": 3}}'),
    ("config.json", '{"rollout": {"rollout_ahead": "x"}}'),
    ("summary.json", "\xff"),
    ("summary.json", '{"phases_s": ["rollout"], "peak_rss_gib": "much"}'),
    ("summary.json", '{"phases_s": {"rollout": null, "train": {}, "evaluate": 0}}'),
    ("samples.jsonl", '{"step": 3, "group_index": 0, "reward": {"score": "x"}, "tokens": 1, "label": "\\ud83d"}\n'),
    ("trace/trainer_0.jsonl", '{"track": "steps", "name": "step 1"}\n{"track": "steps", "start": {}, "end": {}}\n'),
    ("trace/driver.jsonl", '{"track": "a", "name": 1, "start": 1, "end": 2}\n[]\n{"track": "a", "name": "b", "st'),
]


def test_files_of_another_form_are_shown_as_far_as_they_go(url: str, run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time_s": {}, "train/loss": ' + "9" * 400 + ', "perf/step_s": [1]}\n')
        file.write('{"step": 4, "eval/odd/accuracy": null}\n')
    for name, text in OTHER_FORMS:
        (run_dir / name).write_bytes(text.encode("latin-1"))
        notes = get(f"{url}/api/runs/0/overview")["notes"]
        for part in ("metrics", "samples", "spread", "timeline", "engines"):
            get(f"{url}/api/runs/0/{part}")
        told = {"\xff": "summary.json: not UTF-8", OTHER_FORMS[0][1]: "config.json: train must be an object"}
        assert [told[text] in note for note in notes] == [True] if text in told else notes == []
    write_report(run_dir)


def test_values_that_are_no_numbers_are_no_points(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/loss": "high", "train/odd": [1], "time_s": null, "perf/step_s": NaN}\n')
    run = Run(run_dir)
    assert run.overview()["steps"] == 4
    assert run.metrics()["metrics"]["train/loss"]["values"] == [1.0, 0.5, 0.333333, 0.25]
    assert run.metrics()["metrics"]["train/odd"]["values"] == []


def test_a_run_before_its_first_step_says_so_and_shows_why_it_failed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    [run] = Runs([tmp_path]).look()
    assert run.overview()["notes"] == ["metrics.jsonl has not been written yet; the first step or evaluation brings it"]
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "tr')
    assert "no whole line in it yet" in run.overview()["notes"][0] and run.metrics()["metrics"] == {}
    (tmp_path / "run" / "error.log").write_text("ValueError: the engine did not start\n")
    found = run.overview()
    assert (found["state"], found["steps"]) == ("failed", 0) and "did not start" in found["error"]
