"""Files of runs that are too large to be read whole: only what is new, or what is shown, is read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from dashboard_runs import write_trace

from slime_rl.dashboard.line_file import LineFile, read_step_line
from slime_rl.dashboard.runs import MAX_POINTS, thin
from slime_rl.dashboard.samples import GROUPS_PER_PAGE, Samples, find_line
from slime_rl.dashboard.timeline import Timeline, idle_gaps, spans_between
from slime_rl.observability.trace import Trace


def test_each_look_reads_only_what_is_new(tmp_path: Path) -> None:
    path, parsed = tmp_path / "lines.jsonl", []

    def note(line: bytes, offset: int) -> int:
        parsed.append(offset)
        return read_step_line(line, offset)["step"]

    file = LineFile(path, note)
    assert file.look() == [] and file.generation is None
    path.write_text('{"step": 0}\n{"step"')
    assert file.look() == [0]
    with path.open("a") as more:
        more.write(': 1}\nbroken\n{"step": 2}\n')
    assert file.look() == [0, 1, 2] and file.broken == [3]
    assert len(parsed) == len(set(parsed)) == 4


def test_a_file_that_a_resume_has_replaced_is_read_anew(tmp_path: Path) -> None:
    path, aside = tmp_path / "lines.jsonl", tmp_path / "aside"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    file = LineFile(path, lambda line, _: json.loads(line)["step"])
    assert file.look() == [0, 1]
    aside.write_text('{"step": 0}\n{"step": 1}\n{"step": 7}\n')
    os.replace(aside, path)
    assert file.look() == [0, 1, 7]
    path.write_text('{"step": 5}\n')
    assert file.look() == [5]


def write_samples(path: Path, steps: int, groups: int, size: int = 4, padding: int = 0) -> None:
    with path.open("w") as file:
        for step in range(steps):
            for i in range(groups * size):
                group, reward = step * groups + i // size, float(i % size < i // size)
                line = {"step": step, "kind": "training", "index": i, "group_index": group, "prompt": f"p{group}"}
                line |= {"response": f"answer {i}" + "x" * padding, "reward": reward, "response_length": 3}
                file.write(json.dumps(line) + "\n")


def test_a_step_with_many_groups_comes_in_pages(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.jsonl", steps=2, groups=2 * GROUPS_PER_PAGE + 1)
    samples = Samples(tmp_path / "samples.jsonl")
    pages = [samples.page("training", 1, "as trained", "", first) for first in range(0, 20, GROUPS_PER_PAGE)]
    assert [len(page["groups"]) for page in pages] == [8, 8, 1]
    seen = [group["group_index"] for page in pages for group in page["groups"]]
    assert seen == list(range(17, 34)) and pages[0]["num_groups"] == 17
    assert samples.page("training", 1, "as trained", "", 99)["groups"] == []


def test_groups_are_ordered_and_found(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.jsonl", steps=1, groups=4)
    samples = Samples(tmp_path / "samples.jsonl")

    def groups(order: str, find: str = "") -> list[int]:
        return [group["group_index"] for group in samples.page("training", 0, order, find, 0)["groups"]]

    assert groups("as trained") == [0, 1, 2, 3]
    assert groups("highest reward") == [3, 2, 1, 0] and groups("lowest reward") == [0, 1, 2, 3]
    assert groups("largest spread")[0] == 2  # two of its four are right
    assert groups("as trained", "ANSWER 13") == [3] and groups("as trained", "p1") == [1]


def test_a_hundred_thousand_rollouts_are_indexed_once_and_read_a_page_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write_samples(path, steps=300, groups=84, padding=200)  # 100,800 samples
    samples = Samples(path)
    start = time.thread_time()
    page = samples.page("training", None, "as trained", "", 0)
    assert page["step"] == 299 and len(page["steps"]) == 300 and page["num_groups"] == 84
    indexed_s = time.thread_time() - start
    start = time.thread_time()
    samples.page("training", 150, "lowest reward", "", 40)
    assert time.thread_time() - start < indexed_s / 3, "of CPU time"


def test_lines_of_other_writers_are_found_too(tmp_path: Path) -> None:
    assert find_line(b'{"step": 3, "index": 0, "group_index": 5, "prompt": ""}\n', 9).kind == "training"
    assert find_line(b'{"prompt": "", "group_index": 5, "step": 3, "kind": "evaluation"}\n', 9).step == 3
    inside = b'{"step": 3, "index": 0, "group_index": 5, "prompt": "\\"kind\\": \\"evaluation\\""}\n'
    assert find_line(inside, 0).kind == "training"
    for bad in (b"[]\n", b"{}\n", b'{"step": 1, "group_index": "x"}\n', b'{"step": 1, "ind\n'):
        with pytest.raises(ValueError):
            find_line(bad, 0)


def test_samples_without_most_fields_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 0}\n{"step": 0, "reward": {"score": 0.5, "why": "half"}}\n{"step": 0, "reward": NaN}\n')
    [group] = Samples(path).page("training", None, "lowest reward", "", 0)["groups"]
    assert [sample["reward"] for sample in group["samples"]] == [None, 0.5, None] and group["mean"] == 0.5


def test_window_of_a_step_reaches_from_the_end_of_the_step_before_to_its_own(tmp_path: Path) -> None:
    write_trace(tmp_path, steps=5)
    found = Timeline(tmp_path).window(step=2)
    assert (found["from"], found["to"]) == pytest.approx((19, 29)) and found["steps"] == [0, 1, 2, 3, 4]
    tracks = {(t["process"], t["track"]): t for t in found["tracks"]}
    assert next(iter(tracks)) == ("driver", "phases") and tracks["driver", "phases"]["busy"] == pytest.approx(0.9)
    training = tracks["trainer_0", "training"]
    assert training["busy"] == pytest.approx(0.25)
    assert training["gaps"] == [pytest.approx([19, 26]), pytest.approx([28.5, 29])]  # the bubbles
    requests = tracks["rollout", "requests"]  # more at once than lanes
    assert "bars" not in requests and max(many for _, many in requests["at_once"]) == 12 == requests["count"]


def test_newest_steps_are_shown_and_any_other_window_by_its_seconds(tmp_path: Path) -> None:
    write_trace(tmp_path, steps=5, requests=3)
    timeline = Timeline(tmp_path)
    newest = timeline.window()
    assert (newest["from"], newest["to"]) == pytest.approx((19, 49))
    assert newest["marks"] == [[1, 19.0], [2, 29.0], [3, 39.0], [4, 49.0]]  # where a step ends
    part = timeline.window(between=(3.0, 4.0))
    assert {bar[3] for track in part["tracks"] for bar in track["bars"]} == {"rollout", "request"}


def test_window_of_a_file_of_any_size_is_found_without_reading_it_all(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "rollout.jsonl")
    for i in range(200_000):
        trace.add("requests", "request", 10 * i, 10 * i + 15, {"tokens": 4})
    trace.close()
    start = time.thread_time()
    spans, is_cut = spans_between(tmp_path / "rollout.jsonl", 1_500_000, 1_500_100)
    window_s, start = time.thread_time() - start, time.thread_time()
    with (tmp_path / "rollout.jsonl").open() as file:
        assert sum(json.loads(line)["end"] > 0 for line in file) == 200_000
    assert window_s < (time.thread_time() - start) / 3, "of CPU time"
    assert [span["start"] for span in spans] == list(range(1_499_990, 1_500_101, 10)) and not is_cut


def test_span_that_is_longer_than_the_window_is_there(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "driver.jsonl")
    trace.add("phases", "evaluate", 0.0, 1000.0)
    trace.close()
    [track] = Timeline(tmp_path).window(between=(400.0, 410.0))["tracks"]
    assert track["busy"] == 1.0 and track["gaps"] == []


def test_trace_of_a_killed_run_and_of_none(tmp_path: Path) -> None:
    assert Timeline(tmp_path / "none").window()["tracks"] == []
    write_trace(tmp_path, steps=2)
    for name in ("trainer_0", "rollout"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"track": "steps", "na')
    (tmp_path / "trainer_1.jsonl").touch()
    assert Timeline(tmp_path).window()["steps"] == [0, 1]


def test_gaps_are_what_no_bar_covers() -> None:
    assert idle_gaps([(1, 2), (1.5, 4), (6, 12)], 0, 10) == [(0, 1), (4, 6)]
    assert idle_gaps([], 0, 10) == [(0, 10)]


def test_a_long_curve_keeps_its_extremes_and_its_end() -> None:
    steps, values = list(range(50_000)), [0.0] * 50_000
    values[12_345], values[40_001], values[-1] = 9.0, -9.0, 0.5
    few, kept = thin(steps, values)
    assert len(few) <= MAX_POINTS and few == sorted(few)
    assert {9.0, -9.0} <= set(kept) and (few[-1], kept[-1]) == (49_999, 0.5)
    assert thin([1, 2], [0.5, 0.25]) == ([1, 2], [0.5, 0.25])
