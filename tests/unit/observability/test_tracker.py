from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.observability.tracker import (
    JsonlTracker,
    SampleWriter,
    TensorBoardTracker,
    check_tensorboard,
    make_trackers,
    read_jsonl,
)
from slime_rl.types import Sample, Status


def make_samples(count: int) -> list[Sample]:
    samples = []
    for i in range(count):
        sample = Sample(index=i, group_index=0, rollout_id=i, prompt="1+1=", label="2", response="2")
        sample.set_prompt_tokens([1, 2])
        sample.append_tokens([3, 4], log_probs=[-0.1, -0.2], versions=[5, 6])
        sample.reward, sample.status = float(i), Status.COMPLETED
        samples.append(sample)
    return samples


def test_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"train/loss": 0.5, "train/num_microbatches": 3})
    [line] = path.read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time_s") >= 0
    assert record == {"step": 0, "train/loss": 0.5, "train/num_microbatches": 3}


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(0, {"train/loss": math.nan, "train/grad_norm": math.inf})
    [line] = read_jsonl(tmp_path / "metrics.jsonl")
    assert line["train/loss"] is None and line["train/grad_norm"] is None


def test_new_run_starts_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "old": 1}\n')
    JsonlTracker(path).log(0, {"new": 2})
    assert [sorted(line) for line in read_jsonl(path)] == [["new", "step", "time_s"]]


def test_resume_drops_the_steps_that_run_again_and_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [
        {"step": 0, "time_s": 1.0, "eval/m/accuracy": 0.1},
        {"step": 0, "time_s": 10.0, "train/loss": 1.0},
        {"step": 1, "time_s": 20.0, "train/loss": 0.9},
        {"step": 2, "time_s": 25.0, "eval/m/accuracy": 0.2},
        {"step": 2, "time_s": 30.0, "train/loss": 0.8},
        {"step": 3, "time_s": 40.0, "train/loss": 0.7},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "tra')
    tracker = JsonlTracker(path, resume_step=2)
    tracker.log(2, {"train/loss": 0.5})
    kept = read_jsonl(path)
    assert kept[:4] == lines[:4]
    assert kept[4]["train/loss"] == 0.5 and kept[4]["time_s"] >= 25.0
    assert len(kept) == 5


def test_a_resume_drops_the_evaluation_that_it_begins_with_and_keeps_those_of_other_sets(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "time_s": 1.0, "eval/m/accuracy": 0.1},
        {"step": 2, "time_s": 2.0, "eval/m/accuracy": 0.2, "eval/old/accuracy": 0.3},
        {"step": 2, "time_s": 3.0, "eval/m/seconds": 0.2},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    JsonlTracker(path, resume_step=2, again=["m"])
    assert read_jsonl(path) == [lines[0], {"step": 2, "time_s": 2.0, "eval/old/accuracy": 0.3}]


@pytest.mark.parametrize(
    ("again", "stays"), [((), [(1, "evaluation"), (2, "evaluation")]), (("m",), [(1, "evaluation")])]
)
def test_samples_of_an_evaluation_stay_where_it_is_not_repeated(
    tmp_path: Path, again: tuple[str, ...], stays: list[tuple[int, str]]
) -> None:
    path = tmp_path / "samples.jsonl"
    first = SampleWriter(path, per_step=1)
    for step in (1, 2):
        first.write(step, make_samples(1), kind="evaluation")
    first.write(2, make_samples(1))
    SampleWriter(path, per_step=1, resume_step=2, again=again)
    assert [(line["step"], line["kind"]) for line in read_jsonl(path)] == stays


def test_resume_into_a_new_folder_starts_a_file(tmp_path: Path) -> None:
    JsonlTracker(tmp_path / "metrics.jsonl", resume_step=7).log(7, {"a": 1.0})
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [7]


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"no": "step"}', '{"step": "one"}'])
def test_broken_line_inside_a_file_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 1}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*got "):
        read_jsonl(path)


def test_samples_are_spread_over_the_batch(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples.jsonl", per_step=2)
    writer.write(0, make_samples(8))
    writer.write(1, make_samples(1))
    lines = read_jsonl(tmp_path / "samples.jsonl")
    assert [(line["step"], line["index"]) for line in lines] == [(0, 0), (0, 4), (1, 0)]
    assert lines[1]["reward"] == 4.0 and lines[1]["weight_versions"] == [5, 6] and lines[1]["response_length"] == 2


def test_samples_of_steps_that_run_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in range(3):
        SampleWriter(path, per_step=1, resume_step=step).write(step, make_samples(1))
    SampleWriter(path, per_step=1, resume_step=1).write(1, make_samples(1))
    assert [line["step"] for line in read_jsonl(path)] == [0, 1]


def test_tokens_of_a_sample_come_with_what_training_saw_of_them(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples.jsonl", per_step=2)
    log = {1: {"train_log_probs": [-0.3, None], "advantages": [0.5, 0.5]}}
    writer.write(0, make_samples(2), [["a", "b"], ["c", "d"]], log)
    writer.write(1, make_samples(1), kind="evaluation")
    first, second, evaluated = read_jsonl(tmp_path / "samples.jsonl")
    assert "train_log_probs" not in first and first["tokens"] == ["a", "b"] and first["kind"] == "training"
    assert second["train_log_probs"] == [-0.3, None] and second["advantages"] == [0.5, 0.5]
    assert evaluated["kind"] == "evaluation" and "tokens" not in evaluated


def test_label_that_is_not_json_does_not_stop_the_run(tmp_path: Path) -> None:
    sample = make_samples(1)[0]
    sample.label = {1, 2}
    SampleWriter(tmp_path / "samples.jsonl", per_step=1).write(0, [sample])
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["label"] == "{1, 2}"


def test_flags_choose_the_trackers_and_config_is_kept(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--log-samples", "0")
    with make_trackers(config) as trackers:
        trackers.log(0, {"train/loss": 1.0})
        trackers.log_samples(0, make_samples(2))
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "metrics.jsonl"]
    assert json.loads((run / "config.json").read_text())["train"]["num_steps"] == 100


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.log(0, {"train/loss": 0.5})
    tracker.log(1, {"train/loss": 0.25})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 0.5), (1, 0.25)]


def test_tensorboard_keeps_the_evaluation_that_a_resumed_run_goes_on_from(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(tmp_path, "--tensorboard")
    with make_trackers(config) as trackers:
        trackers.log(0, {"train/loss": 3.0})
        trackers.log(1, {"eval/test/accuracy": 0.5, "eval/test/odd": math.nan})
        trackers.log(1, {"train/loss": 2.0})
    with make_trackers(config, resume_step=1) as trackers:
        trackers.log(1, {"train/loss": 1.0})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["eval/test/accuracy"] == [(1, 0.5)]
    assert found["train/loss"] == [(0, 3.0), (1, 1.0)]


def test_missing_tensorboard_names_flag_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--tensorboard needs the package tensorboard: pip install tensorboard"):
        check_tensorboard(make_config(tmp_path, "--tensorboard"))
    check_tensorboard(make_config(tmp_path))
