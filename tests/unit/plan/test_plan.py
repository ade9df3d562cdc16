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


def test_engines_of_several_sizes_are_planned_by_the_smallest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [{"num_gpus": 4, "num_gpus_per_engine": 4}, {"num_gpus": 2}]
    (tmp_path / "sizes.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    flags = ["--train-num-workers", "8", "--recompute-activations"]
    own = [*QWEN, *flags, "--sglang-config", str(tmp_path / "sizes.yaml")]
    _, alike = plan(capsys, *QWEN, *flags, "--rollout-num-engines", "3")
    _, found = plan(capsys, *own)
    assert found["num_gpus"] == 8 + 6
    assert found["engine_bytes"] == alike["engine_bytes"]
    assert found["step"]["sync_s"] == alike["step"]["sync_s"], "all of the weights, however they are cut"
    assert "(1 x 4 + 2 x 1)" in plan(capsys, *own, "--num-gpus", "8")[1]["problems"][-1]
    main(own)
    text = capsys.readouterr().out
    assert "1 x 4 GPUs + 2 x 1 GPU\n" in text and "memory of each engine GPU (the smallest engine)" in text
    groups[0] |= {"num_gpus": 5, "num_gpus_per_engine": 5}
    (tmp_path / "sizes.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    assert "must divide the model's 32 attention heads, got 5" in "\n".join(plan(capsys, *own)[1]["problems"])


def test_engines_larger_than_a_node_need_to_be_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*QWEN, "--num-nodes", "2", "--num-workers-per-node", "8", "--rollout-num-gpus-per-engine", "16"]
    flags += ["--recompute-activations", "--weight-sync", "distributed"]
    code, found = plan(capsys, *flags)
    text = "--rollout-num-gpus-per-engine puts 16 GPUs of an engine on one node, which has 8: give --rollout-num-gpus"
    assert code == 1 and text in found["problems"][-1]
    assert not plan(capsys, *flags, "--gpus-per-node", "16")[1]["problems"]
    assert not plan(capsys, *flags, "--rollout-num-gpus-per-node", "8")[1]["problems"]
    found = plan(capsys, *flags, "--rollout-num-gpus-per-node", "8", "--gpus-per-node", "4")[1]
    assert "--num-workers-per-node (8) is more than the 4 GPUs of a node" in found["problems"]


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


def test_no_time_is_told_for_engines_without_room_and_the_reason_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shape", "llama-3.1-70b", "--train-dtype", "bfloat16", "--train-num-workers", "64", "--gpu", "h100-80g"])
    said = capsys.readouterr().out
    assert "the engines have no room for a request" in said and "give --gpu" not in said


def test_a_supervised_run_has_a_time_from_the_data_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--loss", "sft", "--n-samples-per-prompt", "1", "--train-num-workers", "8", "--mean-prompt-len", "100"]
    _, found = plan(capsys, *QWEN, *flags, "--mean-response-len", "100")
    step = found["step"]
    operations = 3 * (2 * found["active_parameters"] + 2 * 36 * 4096 * 200) * 32 * 200
    assert step["step_s"] == pytest.approx(step["train_s"])
    assert step["train_s"] == pytest.approx(operations / (8 * 989e12 * 0.35))
    assert step["rollout_s"] == step["sync_s"] == 0
    main([*QWEN, *flags])
    assert "data sheet at 35% training efficiency" in capsys.readouterr().out


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


def test_a_supervised_run_gives_rates_for_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"train/tokens": 1600, "rollout/response_length_mean": 80, "rollout/response_length_max": 100,
            "timing_s/train": 4.0}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **line}) + "\n" for i in range(3)) + '{"st')
    (tmp_path / "config.json").write_text('{"train": {"rollout_batch_size": 16}}')
    flags = ["--hf-checkpoint", str(write_model_folder(tmp_path / "model")), "--device", "cpu", "--loss", "sft"]
    flags += ["--n-samples-per-prompt", "1", "--rollout-batch-size", "16", "--max-response-len", "100"]
    flags += ["--max-prompt-len", "100", "--rates", str(tmp_path)]
    assert plan(capsys, *flags)[1]["step"]["step_s"] == pytest.approx(4.0)
    assert main(flags) == 0
    assert "rollout" not in capsys.readouterr().out.split("time of a step")[1]
    assert main([*flags, "--loss", "policy", "--n-samples-per-prompt", "8"]) == 2
    assert f"--rates {tmp_path}: no rollout/tokens_per_s in its metrics" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, **line, "timing_s/train": 0}) + "\n")
    assert main(flags) == 2
    assert "timing_s/train must be > 0 on average, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus-per-node", "0"], "--gpus-per-node must be >= 1, got 0"),
        (["--num-gpus", "-3"], "--num-gpus must be >= 1, got -3"),
        (["--mean-response-len", "nan"], "--mean-response-len must be > 0 and at most --max-response-len (100), got n"),
        (["--mean-prompt-len", "-5"], "--mean-prompt-len must be > 0 and at most --max-prompt-len"),
        (["--mean-response-len", "1e9"], "--max-response-len (100), got 1e+09"),
    ],
)
def test_absurd_sizes_are_refused_by_flag(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--max-response-len", "100", *flags]) == 2
    assert said in capsys.readouterr().err


def test_bad_names_are_told_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "gpt-5"]) == 2
    assert "--shape must be one of" in capsys.readouterr().err
    for words in (["--hf-checkpoint", "elsewhere"], ["--hf-checkpoint=elsewhere"]):
        assert main(["--shape", "qwen3-8b", *words]) == 2
        assert "--shape stands in for --hf-checkpoint; give one of them" in capsys.readouterr().err
    assert main([*QWEN[:-1], "abacus"]) == 2
    assert "--gpu must be one of cpu, a100-40g" in capsys.readouterr().err


def test_text_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    main([*QWEN, "--train-num-workers", "8", "--pp-size", "2"])
    text = capsys.readouterr().out
    for word in ("sizes", "memory of each training worker", "KV cache", "% idle", "trainers idle", "FITS"):
        assert word in text
