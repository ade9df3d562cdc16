"""Checkpoints of real runs: in the background, exported along the way, taken as start weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_runs import base_flags, read_metrics, run_side_by_side, run_train, train_metrics

from benchmarks.hf_parity import same_weights
from slime_rl.cluster.checkpoint import find_checkpoint, verify
from tools import convert_torch_dist_to_hf


def sft_flags(data: Path, run_dir: Path) -> list[str]:
    """Supervised steps, which need no engine."""
    sizes = ["--loss", "sft", "--n-samples-per-prompt", "1", "--rollout-batch-size", "16"]
    return [*base_flags(data, run_dir), *sizes]


@pytest.fixture(scope="module")
def first_run(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with a background save after each."""
    run_dir = tmp_path_factory.mktemp("checkpoint_runs") / "run"
    saves = ["--save-interval", "1", "--async-save", "--keep-checkpoints", "1", "--keep-checkpoint-every", "2"]
    exports = ["--save-hf", str(run_dir / "exports" / "{step}")]
    result = run_train([*sft_flags(quickstart_data, run_dir), "--num-steps", "4", *saves, *exports])
    assert result.returncode == 0, result.stdout + result.stderr
    return run_dir


@pytest.fixture(scope="module")
def loaded(first_run: Path, quickstart_data: Path) -> Path:
    """The folder of two runs that begin with its checkpoint."""
    folder = first_run.parent
    load = ["--load", str(first_run / "checkpoints")]
    held = ["--eval-prompt-data", "held", str(quickstart_data / "heldout.jsonl")]
    run_side_by_side(
        [*sft_flags(quickstart_data, folder / "finetune"), *load, "--finetune", "--num-steps", "1"],
        [*base_flags(quickstart_data, folder / "evaluation"), *load, *held, "--num-steps", "0", "--fully-async"],
    )
    return folder


def test_background_saves_are_whole_and_exports_are_those_weights(first_run: Path, tmp_path: Path) -> None:
    kept = sorted(path.name for path in (first_run / "checkpoints").iterdir())
    assert kept == ["latest", "step_00000002", "step_00000004"]
    assert sorted(path.name for path in (first_run / "exports").iterdir()) == ["1", "2", "3", "4"]
    for step in (2, 4):
        folder = first_run / "checkpoints" / f"step_{step:08d}"
        verify(folder)
        arguments = ["--input-dir", str(folder), "--output-dir", str(tmp_path / str(step))]
        assert convert_torch_dist_to_hf.main(arguments) == 0
        assert same_weights(first_run / "exports" / str(step), tmp_path / str(step))


def test_finetune_begins_anew_with_the_weights(first_run: Path, loaded: Path) -> None:
    (step,) = train_metrics(loaded / "finetune")
    losses = [line["train/loss"] for line in train_metrics(first_run)]
    assert step["step"] == 0
    assert step["train/loss"] < losses[1]  # the first prompts again, by a model that has had four updates


def test_a_checkpoint_is_evaluated_without_training(loaded: Path) -> None:
    run_dir = loaded / "evaluation"
    (line,) = read_metrics(run_dir)
    assert line["step"] == 4 and line["eval/held/num_prompts"] == 16
    assert json.loads((run_dir / "summary.json").read_text())["finished_steps"] == 4
    assert not (run_dir / "hf").exists()


def test_checkpoint_of_another_model_is_refused_with_both_named(first_run: Path, quickstart_data: Path) -> None:
    flags = sft_flags(quickstart_data, first_run)
    meta = find_checkpoint(first_run / "checkpoints")[0] / "meta.json"
    content = json.loads(meta.read_text())
    meta.write_text(json.dumps(content | {"model_type": "llama"}))
    try:
        result = run_train([*flags, "--num-steps", "5", "--load", str(first_run / "checkpoints")])
    finally:
        meta.write_text(json.dumps(content))
    assert result.returncode == 2
    assert "is a checkpoint of a llama model" in result.stderr and "is qwen3 (64x2x" in result.stderr
