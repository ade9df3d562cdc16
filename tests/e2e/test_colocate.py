"""Trainer and engine taking turns: the engine really gives its weights' memory back and serves the new ones after."""

from __future__ import annotations

from pathlib import Path

from e2e_runs import base_flags, run_train, train_metrics


def test_a_colocated_run_trains_on_what_its_engine_says(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--colocate", "--num-steps", "3", "--save-interval", "2", "--weight-sync", "disk")
    result = run_train([*base_flags(quickstart_data, run_dir), *flags])
    assert result.returncode == 0, result.stdout + result.stderr
    steps = train_metrics(run_dir)
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps:
        assert line["train/logprob_diff_mean_abs"] < 1e-4
        assert line["rollout/staleness_max"] == 0
        assert line["faults/engine_restarts"] == 0
    assert (run_dir / "hf" / "config.json").exists()
    assert list((run_dir / "weight_sync").iterdir()) == []
