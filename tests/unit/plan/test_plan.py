"""`python -m slime_rl.plan` from the command line: what fits, what does not, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import write_model_folder

from slime_rl.plan.__main__ import main

QWEN = ["--shape", "qwen3-8b", "--train-dtype", "bfloat16", "--gpu", "h100-80g"]


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    code = main([*flags, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_layout_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train-num-workers", "8", "--rollout-num-engines", "8", "--recompute-activations"]
    code, found = plan(capsys, *QWEN, *flags, "--num-gpus", "16")
    assert code == 0 and found["fits"]
    assert found["num_gpus"] == 16
    assert found["step"]["step_s"] > found["step"]["train_s"] > 0


def test_one_gpu_cannot_train_8b_and_the_largest_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, *QWEN)
    assert code == 1
    assert "the largest part is optimizer: try more --train-num-workers" in found["problems"][0]


def test_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, *QWEN, "--train-num-workers", "8", "--num-gpus", "8")
    assert code == 1
    assert "needs 9 GPUs, there are 8" in found["problems"][-1]


def test_colocated_sides_share_their_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train-num-workers", "8", "--rollout-num-engines", "8", "--recompute-activations", "--colocate"]
    assert plan(capsys, *QWEN, *flags)[1]["num_gpus"] == 8


def test_sizes_that_do_not_divide_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*QWEN, "--tp-size", "16", "--pp-size", "5", "--train-num-workers", "80", "--max-response-len", "65536"]
    _, found = plan(capsys, *flags)
    text = "\n".join(found["problems"])
    assert "--tensor-model-parallel-size must divide the model's 8 key-value heads, got 16" in text
    assert "--pipeline-model-parallel-size must divide the model's 36 layers, got 5" in text
    assert "more than the model's 40960 positions" in text


def test_an_engine_too_small_for_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, "--shape", "llama-3.1-70b", "--train-dtype", "bfloat16", "--train-num-workers", "64")
    assert code == 1
    assert any("--rollout-num-gpus-per-engine" in problem for problem in found["problems"])


def test_rates_of_a_measured_run_take_the_place_of_the_data_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    line = {
        "train/tokens": 1600, "rollout/response_length_mean": 80, "rollout/response_length_max": 100,
        "rollout/seconds": 2.0, "rollout/tokens_per_s": 640, "timing_s/train": 4.0, "timing_s/sync": 0.5,
        "perf/step_s": 6.5,
    }  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "time_s": i, **line}) + "\n" for i in range(3)))
    (run / "config.json").write_text(json.dumps({"train": {"rollout_batch_size": 4, "n_samples_per_prompt": 4}}))
    model = write_model_folder(tmp_path / "model")
    flags = ["--hf-checkpoint", str(model), "--device", "cpu", "--rates", str(run), "--max-prompt-len", "100"]
    flags += ["--max-response-len", "100", "--engine-max-total-tokens", "300"]
    code, found = plan(capsys, *flags, "--rollout-batch-size", "4", "--n-samples-per-prompt", "4")
    assert code == 0, found["problems"]
    assert found["step"] | {"staleness": 0} == {
        "rollout_s": 2.0, "train_s": 4.0, "sync_s": 0.5, "step_s": 6.5, "staleness": 0,
        "trainer_idle_share": pytest.approx(1 - 4 / 6.5), "engines_idle_share": pytest.approx(1 - 2 / 6.5),
    }  # fmt: skip
    # twice the workers on twice the samples take as long
    flags += ["--train-num-workers", "2", "--rollout-num-engines", "2"]
    _, twice = plan(capsys, *flags, "--rollout-batch-size", "8", "--n-samples-per-prompt", "4")
    assert twice["step"]["train_s"] == pytest.approx(4.0)
    assert twice["step"]["rollout_s"] == pytest.approx(2.0)


def test_bad_names_are_told_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "gpt-5"]) == 2
    assert "--shape must be one of" in capsys.readouterr().err
    assert main([*QWEN[:-1], "abacus"]) == 2
    assert "--gpu must be one of cpu, a100-40g" in capsys.readouterr().err


def test_text_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    main([*QWEN, "--train-num-workers", "8", "--pp-size", "2"])
    text = capsys.readouterr().out
    for word in ("sizes", "memory of each training worker", "KV cache", "% idle", "trainers idle", "FITS"):
        assert word in text
