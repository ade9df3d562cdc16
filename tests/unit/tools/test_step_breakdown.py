"""benchmarks/step_breakdown.py on runs as they come: it is what docs/debugging.md sends people to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step_breakdown import main


def write_run(folder: Path, *lines: dict[str, object]) -> str:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_means_leave_the_first_step_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        {"step": step, "perf/step_s": seconds, "timing_s/train": seconds - 1, "timing_s/other": 1.0}
        for step, seconds in enumerate((50.0, 4.0, 6.0))
    ]
    unmeasured = {"step": 3, "perf/step_s": None, "timing_s/train": None, "timing_s/other": None}
    assert main([write_run(tmp_path, *steps, unmeasured)]) == 0
    text = capsys.readouterr().out
    assert "| train | 4.000 | 80.0 % |" in text
    assert text.endswith("steps=2 step_s=5.000 overhead_share=0.2000\n")


@pytest.mark.parametrize("lines", [[], [{"step": 0, "perf/step_s": 1.0}], [{"loss": 1.0}, {"step": 1}]])
def test_a_run_without_steps_or_with_broken_lines_is_refused_in_a_line(
    lines: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write_run(tmp_path, *lines)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"step_breakdown: {tmp_path}") and error.count("\n") == 1


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "must be the folder of a run, with metrics.jsonl in it" in capsys.readouterr().err
