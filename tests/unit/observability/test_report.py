from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from slime_rl.config import parse_config
from slime_rl.observability.charts import CHARTS
from slime_rl.observability.report import main, write_report
from slime_rl.observability.run_record import RunRecord, load_run
from slime_rl.observability.tracker import make_trackers
from slime_rl.types import Sample, Status

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(tmp_path: Path, num_steps: int, *flags: str, evaluations: bool = True) -> Path:
    eval_path = write_prompts(tmp_path / "eval.jsonl")
    config = make_config(tmp_path, "--eval-prompt-data", "math", str(eval_path), "--num-steps", str(num_steps), *flags)
    with make_trackers(config) as trackers:
        if evaluations:
            trackers.log(0, {"eval/math/accuracy": 0.25})
        for step in range(num_steps):
            trackers.log(step, step_metrics(step))
            trackers.log_samples(step, [sample(step)])
        if evaluations and num_steps:
            trackers.log(num_steps, {"eval/math/accuracy": 0.875})
    return tmp_path / "run"


def step_metrics(step: int) -> dict[str, float]:
    return {
        "train/loss": 1.0 / (step + 1),
        "train/logprob_diff_mean_abs": 1e-6,
        "train/logprob_diff_max_abs": 1e-5,
        "train/grad_norm": math.nan if step == 1 else 1.0,
        "rollout/reward_mean": 0.1 * step,
        "rollout/reward_std": 0.2,
        "rollout/reward_max": 1.0,
        "rollout/reward_min": 0.0,
        "rollout/response_length_mean": 5.0,
        "rollout/response_length_max": 9.0,
        "timing_s/rollout": 2.0,
        "timing_s/train": 1.5,
        "timing_s/train/optimizer": 0.25,
        "timing_s/other": 0.5,
        "perf/step_s": 4.0,
        "perf/tokens_per_s": 1000.0,
        "perf/peak_rss_gib": 3.25,
    }


def sample(step: int) -> Sample:
    made = Sample(
        index=step, group_index=0, rollout_id=step, prompt=[{"role": "user", "content": "1<2 & 3"}], label="yes"
    )
    made.response, made.reward, made.status = "<script>alert(1)</script>", 1.0, Status.COMPLETED
    return made


def assert_self_contained(page: str) -> None:
    assert "<script" not in page and "<link" not in page
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r"src='([^']*)'", page))


def test_report_holds_headline_curves_times_flags_and_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path, 4, "--lr", "1e-4", "--no-shuffle", "--sglang-log-level", "info")
    page = write_report(run).read_text()
    assert_self_contained(page)
    pngs = {path.name for path in run.glob("*.png") if path.read_bytes().startswith(PNG)}
    assert pngs == {"accuracy.png", "reward.png", "loss.png", "logprob_diff.png", "length.png", "timing.png"}
    assert page.count("<img ") == 6
    assert "0.25 <span class='arrow'>→</span> 0.875" in page
    assert "<td>rollout</td><td class='n'>8.00 s</td><td class='n'>50.0 %</td><td class='n'>2.00 s</td>" in page
    assert "<td>train / optimizer</td><td class='n'>1.00 s</td><td class='n'>6.2 %</td>" in page
    assert "<td>other</td><td class='n'>2.00 s</td><td class='n'>12.5 %</td>" in page
    assert "<code>--lr</code></td><td><code>0.0001</code>" in page
    assert "--no-shuffle" in page and "--sglang-log-level info" in page
    assert "user: 1&lt;2 &amp; 3" in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "3.25 GiB" in page


def test_command_in_the_report_gives_the_same_configuration(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, 2, *("--lr", "1e-4", "--no-shuffle", "--sglang-log-level", "info"), *("--rollout-stop", "a b", "c")
    )
    import shlex

    words = shlex.split(load_run(run).command())
    again = parse_config(words[3:])
    assert words[:3] == ["python", "-m", "slime_rl.train"]
    assert json.loads((run / "config.json").read_text()) == json.loads(json.dumps(vars_of(again), default=str))


def vars_of(config: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(config)


def test_run_without_steps_reports_its_evaluation(tmp_path: Path) -> None:
    run = write_run(tmp_path, 0)
    page = write_report(run).read_text()
    assert_self_contained(page)
    assert "evaluation only · no training steps" in page and "accuracy · math" in page
    assert [path.name for path in run.glob("*.png")] == ["accuracy.png"]


def test_run_without_a_single_line_still_gives_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, 0, evaluations=False)
    page = write_report(run).read_text()
    assert "No metrics were logged" in page and list(run.glob("*.png")) == []


def test_run_with_one_step_draws_no_curves_of_one_point(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1)
    write_report(run)
    assert {path.name for path in run.glob("*.png")} == {"accuracy.png", "timing.png"}


def test_run_broken_off_early_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, 3)
    config = json.loads((run / "config.json").read_text())
    config["train"]["num_steps"] = 10
    (run / "config.json").write_text(json.dumps(config))
    assert "3 of 10 steps" in write_report(run).read_text()


def test_end_of_a_run_adds_memory_and_what_lay_outside_of_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path, 2)
    summary = {"peak_rss_gib": 7.5, "phases_s": {"start": 31.0, "rollout": 4.0, "train": 3.0, "evaluate": 12.0}}
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report(run).read_text()
    assert "7.50 GiB" in page
    assert "8.00 s in steps; outside of them: start 31.0 s, evaluate 12.0 s." in page


def test_report_needs_only_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n{"step": 1, "train/loss": null}\n')
    assert "train/loss" in write_report(tmp_path).read_text()


def test_step_that_was_logged_twice_counts_once_with_its_last_value(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a": 2.0}\n{"step": 1, "a": 3.0}\n')
    series = load_run(tmp_path).series("a")
    assert (series.steps, series.values) == ([0, 1], [1.0, 3.0])


def test_command_line_prints_the_page_or_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, 1)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "must be the folder of a run, with metrics.jsonl in it" in capsys.readouterr().err


def test_a_long_run_has_no_bar_for_every_step() -> None:
    lines = [{"step": i, "perf/step_s": 3.0, "timing_s/rollout": 2.0 + i % 2} for i in range(1001)]
    record = RunRecord(folder=Path("run"), lines=lines, config={}, samples=[], summary={})
    axes = Figure().subplots()
    assert CHARTS["timing"][1](record, axes)
    bars = axes.containers[0]
    assert len(bars) == 143 and bars[0].get_height() == pytest.approx(2 + 3 / 7)  # means of 7 steps
    assert axes.get_ylabel() == "seconds per step, means of 7"


@pytest.mark.parametrize("longer", ["rollout", "train"])
def test_a_phase_has_its_colour_in_every_report(longer: str) -> None:
    lines = [
        {"step": 0, "perf/step_s": 4.0, "timing_s/rollout": 1.0, "timing_s/train": 1.0} | {f"timing_s/{longer}": 3.0}
    ]
    axes = Figure().subplots()
    assert CHARTS["timing"][1](RunRecord(folder=Path("run"), lines=lines, config={}, samples=[], summary={}), axes)
    colours = {bars.get_label(): to_hex(bars[0].get_facecolor()) for bars in axes.containers}
    assert (colours["rollout"], colours["train"]) == ("#4c78a8", "#f58518")
