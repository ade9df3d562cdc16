"""--dry-run says what was checked, what failed, and what could not be checked here; it starts and writes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest
from factories import make_config, write_model_folder

from slime_rl import preflight as preflight_module
from slime_rl.config import Config
from slime_rl.engine.vocabulary import NAME, VARIABLE
from slime_rl.preflight import Finding, Verdict, check_on_device, dry_run, preflight, run_checks
from slime_rl.rollout.groups import GroupRunner
from slime_rl.train import main


def findings(tmp_path: Path, *flags: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in run_checks(make_config(tmp_path, "--device", "cpu", *flags))}


def test_what_is_missing_here_is_said_and_not_passed_over(tmp_path: Path) -> None:
    found = findings(tmp_path, "--max-prompt-len", "64", "--max-response-len", "64")
    assert found["model files"].verdict is Verdict.NOT_CHECKED and "must hold weights" in found["model files"].text
    assert found["tokenizer and prompts"].verdict is Verdict.NOT_CHECKED
    assert found["data"].verdict is found["parallel sizes"].verdict is Verdict.OK


def test_every_failure_is_shown_not_only_the_first(tmp_path: Path) -> None:
    flags = ["--tp-size", "3", "--train-num-workers", "3", "--advantage-estimator", "nothing:here"]
    found = findings(tmp_path, *flags, "--max-prompt-len", "300")
    assert "must divide the model's 4 attention heads, got 3" in found["parallel sizes"].text
    assert found["plugins"].verdict is Verdict.FAILED
    assert "more than the 256 positions" in found["context length"].text


@pytest.mark.parametrize(
    ("sizes", "workers", "message"),
    [
        ((1, 1, 2), ("--train-num-workers", "5"), "--train-num-workers must be a multiple of .*, got 5"),
        ((2, 2, 2), ("--num-nodes", "2", "--num-workers-per-node", "3"), "3 x an engine of 2 GPUs .* do not fit"),
        ((1, 1, 2), ("--train-num-workers", "4"), None),
    ],
)
def test_engines_that_share_gpus_must_fit_on_the_train_workers_bundles(
    tmp_path: Path, sizes: tuple[int, ...], workers: tuple[str, ...], message: str | None
) -> None:
    groups = [{"num_gpus": size, "num_gpus_per_engine": size} for size in sizes]
    file = tmp_path / "engines.yaml"
    file.write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    flags = ("--sglang-config", str(file), "--colocate", *workers, "--rollout-batch-size", "60")
    found = findings(tmp_path, *flags)["size of the machine"]
    if message is None:
        assert found.verdict is Verdict.OK, found.text
    else:
        assert found.verdict is Verdict.FAILED and re.search(message, found.text), found.text


def test_engines_of_a_model_beside_the_policy_divide_its_own_heads(tmp_path: Path) -> None:
    sizes = {"judge": 3, "frozen": 1}
    models = [{"name": name, "server_groups": [{"num_gpus": 3, "num_gpus_per_engine": n}]} for name, n in sizes.items()]
    models[0]["model_path"] = str(write_model_folder(tmp_path / "j", num_attention_heads=6, num_key_value_heads=6))
    models[1]["update_weights"] = False
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"sglang": [{"name": "p", "server_groups": [{"num_gpus": 1}]}, *models]}))
    flags = ("--sglang-config", str(file))
    assert findings(tmp_path, *flags)["parallel sizes"].verdict is Verdict.OK
    file.write_text(file.read_text().replace('"num_gpus_per_engine": 1', '"num_gpus_per_engine": 3'))
    found = findings(tmp_path, *flags)["parallel sizes"]
    assert found.text == f"--sglang-config {file}: frozen: num_gpus_per_engine must divide the model's 4 attention " + (
        "heads, got 3"
    )
    write_model_folder(tmp_path / "j", architectures=["Mamba2ForCausalLM"], hidden_size=None)
    file.write_text(file.read_text().replace('"num_gpus_per_engine": 3', '"num_gpus_per_engine": 1'))
    assert findings(tmp_path, *flags)["parallel sizes"].verdict is Verdict.OK, "SGLang knows more kinds than we do"


def test_weights_in_a_form_that_is_not_known_are_refused(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    found = findings(tmp_path, "--hf-checkpoint", str(model))["quantisation"]
    assert found.verdict is Verdict.FAILED
    assert "awq/config.json: quantization_config.quant_method must be fp8" in found.text and "got 'awq'" in found.text
    assert findings(tmp_path)["quantisation"] == Finding("quantisation", Verdict.OK, "")


def test_prompts_are_rendered_and_those_that_will_be_left_out_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_config(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(preflight_module, "load_tokenizer", lambda config: None)
    monkeypatch.setattr(preflight_module, "encode_prompt", lambda config, tokenizer, prompt, metadata: list(prompt))

    def said(*lengths: int) -> Finding:
        rows = "".join(json.dumps({"prompt": "x" * n, "label": "1"}) + "\n" for n in lengths)
        (tmp_path / "p.jsonl").write_text(rows)
        flags = ("--prompt-data", str(tmp_path / "p.jsonl"), "--max-prompt-len", "10", "--long-prompt", "skip")
        return findings(tmp_path, *flags)["tokenizer and prompts"]

    assert said(3, 50, 7).text == "rendered 3 prompts: 20 tokens each, at most 50"
    every = said(40, 50)
    assert (every.verdict, every.text) == (
        Verdict.OK,
        "all of 2 prompts are over --max-prompt-len 10, at least 40 tokens",
    )


def test_a_run_stops_where_a_dry_run_only_says_not_checked(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--device", "cpu", "--max-prompt-len", "64", "--max-response-len", "64")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*: must hold weights"):
        preflight(config)


def test_a_config_that_would_train_wrong_is_found(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = Path(config.model.hf_checkpoint) / "config.json"
    path.write_text(path.read_text().replace('"rope_theta"', '"attention_twist": 3, "rope_theta"'))
    found = {finding.name: finding for finding in run_checks(config)}
    assert found["architecture"].verdict is Verdict.FAILED
    assert "the field 'attention_twist' = 3 is not known" in found["architecture"].text


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path)
    run_dir = tmp_path / "run"
    flags = ["--hf-checkpoint", config.model.hf_checkpoint, "--prompt-data", str(config.data.prompt_data)]
    flags += ["--run-dir", str(run_dir), "--device", "cpu", "--max-prompt-len", "64", "--max-response-len", "64"]
    assert main([*flags, "--dry-run", "--lr", "0.25"]) == 0
    text = capsys.readouterr().out
    assert "--lr 0.25" in text and "arguments of the first engine" in text and "memory of each engine" in text
    assert text.splitlines()[-1].startswith("READY")
    assert not run_dir.exists()
    assert main([*flags, "--dry-run", "--max-response-len", "1024"]) == 2
    assert "NOT READY: context length" in capsys.readouterr().out
    groups = [{"num_gpus": 1, "overrides": {"page-size": size}} for size in (1, 2)]
    (tmp_path / "groups.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    main([*flags, "--dry-run", "--sglang-config", str(tmp_path / "groups.yaml")])
    two = capsys.readouterr().out
    assert "engine of p, group 0\n" in two and "engine of p, group 1\n" in two
    assert re.findall(r"--page-size=\d", two) == ["--page-size=1", "--page-size=2"]


def test_an_occupied_run_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert findings(tmp_path)["run folder"].verdict is Verdict.FAILED
    assert "cleared first" in findings(tmp_path, "--overwrite")["run folder"].text


def test_the_plan_of_a_dry_run_is_for_this_machine(tmp_path: Path) -> None:
    text, _ = dry_run(make_config(tmp_path, "--device", "cpu"))
    assert "1 x 1 process" in text and "h100" not in text


def test_a_check_that_breaks_down_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> str:
        raise TypeError("two and two")

    monkeypatch.setitem(preflight_module.THOROUGH, "device", broken)
    found = findings(tmp_path)
    assert found["device"] == Finding("device", Verdict.FAILED, "TypeError: two and two")
    assert found["data"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--generate-function-path", "environment_loop"), "environment_loop needs --environment-path"),
        (("--generate-function-path", "gateway"), "gateway needs --agent-path"),
        (("--rm-type", "judge", "--judge-prompt", str(pytest.__file__)), "must contain {response}"),
        (("--rm-type", "mixture", "--reward-mixture", "banana=1"), "--reward-mixture: 'banana' is not one of"),
        (("--rm-type", "mixture", "--reward-mixture", "mixture=1"), "a mixture cannot contain itself"),
        (("--rm-type", "nope"), "--rm-type: 'nope' is not one of"),
        (("--tools", "nope"), "--tools: there is no tool 'nope'"),
        (("--agent-path", "nope"), "--agent-path: 'nope' is not of the form"),
    ],
)
def test_what_a_chosen_builtin_needs_is_asked_for_before_the_run(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    assert message in findings(tmp_path, *flags)["plugins"].text


def test_an_empty_reward_path_is_not_the_built_in_reward(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--reward-function-path: '' is not of the form"):
        config = make_config(tmp_path)
        reward = dataclasses.replace(config.reward, reward_function_path="")
        GroupRunner(dataclasses.replace(config, reward=reward))


def test_what_no_machine_like_this_one_holds_is_refused(tmp_path: Path) -> None:
    found = findings(tmp_path, "--rollout-num-engines", "100000")["size of the machine"]
    assert found.verdict is Verdict.FAILED
    assert "1 train workers" in found.text and "100000 engine processes (--rollout-num-engines" in found.text
    assert (
        findings(tmp_path, "--rollout-num-gpus-per-engine", "100000")["size of the machine"].verdict is Verdict.FAILED
    )
    assert findings(tmp_path, "--rollout-num-engines", "2")["size of the machine"].verdict is Verdict.OK
    elsewhere = findings(tmp_path, "--rollout-num-engines", "100000", "--ray-address", "there:1")["size of the machine"]
    assert elsewhere == Finding("size of the machine", Verdict.OK, "decided by the Ray cluster at there:1")


def test_gpus_of_this_machine_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_rl.preflight.engine_device", lambda requested: "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    flags = ("--device", "cuda", "--train-num-workers", "4", "--rollout-num-gpus-per-engine", "4")
    assert findings(tmp_path, *flags)["size of the machine"] == Finding(
        "size of the machine", Verdict.OK, "8 of 8 GPUs"
    )
    more = findings(tmp_path, *flags, "--rollout-num-engines", "2")["size of the machine"]
    assert more.verdict is Verdict.FAILED and "the run takes 12 GPUs" in more.text and "has 8" in more.text


def test_a_dry_run_for_gpus_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_rl.engine.device.DRIVER_FILES", ())
    monkeypatch.setattr(preflight_module, "check_sglang_args", lambda config: None)
    flags = ("--device", "cuda", "--sglang-page-size", "8", "--router-max-concurrent-requests", "9")
    found = findings(tmp_path, *flags)
    assert found["arguments passed through"].verdict is Verdict.OK
    assert found["device"].verdict is found["size of the machine"].verdict is Verdict.NOT_CHECKED
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = findings(tmp_path, *flags)["arguments passed through"]
    assert missing.verdict is Verdict.NOT_CHECKED
    assert missing.text == "not checked: sglang is not installed here, and --page-size is for it"


def test_a_backend_that_is_missing_here_is_no_fault_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(config: Config) -> str:
        raise ModuleNotFoundError("No module named 'megatron'", name="megatron.core")

    monkeypatch.setitem(preflight_module.THOROUGH, "architecture", missing)
    found = findings(tmp_path)["architecture"]
    assert found == Finding("architecture", Verdict.NOT_CHECKED, "not checked: megatron is not installed here")


def test_lengths_are_those_of_the_policys_engines(tmp_path: Path) -> None:
    """A judge reads other sequences; groups may have positions and caches of their own."""
    judge = write_model_folder(tmp_path / "judge", max_position_embeddings=64)

    def said(overrides: str, *flags: str) -> Finding:
        policy = f"{{name: p, server_groups: [{{num_gpus: 1}}, {{num_gpus: 1, overrides: {overrides}}}]}}"
        other = f"{{name: j, model_path: {judge}, server_groups: [{{num_gpus: 1}}]}}"
        (tmp_path / "engines.yaml").write_text(f"sglang: [{policy}, {other}]")
        lengths = ("--max-prompt-len", "100", "--max-response-len", "100")
        return findings(tmp_path, "--sglang-config", str(tmp_path / "engines.yaml"), *lengths, *flags)["context length"]

    assert said("{}").verdict is Verdict.OK
    assert "more than the 150 positions" in said("{context-length: 150}").text
    assert "an engine's cache (--engine-max-total-tokens), got 150" in said("{max-total-tokens: 150}").text
    longer = ("--sglang-context-length", "100000", "--max-response-len", "40000")
    assert "got 32768" in said("{}", *longer).text
    assert said("{}", *longer, "--engine-max-total-tokens", "50000").verdict is Verdict.OK


def test_a_way_for_caches_is_checked_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_rl.engine.device.DRIVER_FILES", ())
    group = "num_gpus: 1, overrides: {disaggregation-transfer-backend: nixl}"
    groups = ", ".join(f"{{worker_type: {kind}, {group}}}" for kind in ("prefill", "decode"))
    (tmp_path / "engines.yaml").write_text(f"sglang: [{{name: p, server_groups: [{groups}]}}]")
    monkeypatch.setattr(preflight_module, "check_sglang_args", lambda config: None)
    flags, name = ("--sglang-config", str(tmp_path / "engines.yaml")), "prefill and decode engines"
    assert "nixl, which does not work on CPU" in findings(tmp_path, *flags)[name].text
    assert findings(tmp_path, *flags, "--device", "cuda")[name].verdict is Verdict.NOT_CHECKED
    elsewhere = make_config(tmp_path, *flags, "--device", "auto", "--ray-address", "there:1")
    assert {f.name: f for f in run_checks(elsewhere)}[name].text == "decided by the Ray cluster at there:1"
    settled = dataclasses.replace(elsewhere, cluster=dataclasses.replace(elsewhere.cluster, device="cpu"))
    with pytest.raises(ValueError, match="which does not work on CPU"):
        check_on_device(settled)


def test_what_a_shared_router_reads_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = f"{{name: j, model_path: {write_model_folder(tmp_path / 'j')}, server_groups: [{{num_gpus: 1}}]}}"
    (tmp_path / "engines.yaml").write_text(f"sglang: [{{name: p, server_groups: [{{num_gpus: 1}}]}}, {judge}]")
    config = make_config(tmp_path, "--sglang-config", str(tmp_path / "engines.yaml"), "--share-router")
    look, path = preflight_module.QUICK["shared router"], tmp_path / "share" / NAME
    monkeypatch.delenv(VARIABLE, raising=False)
    assert f"so sglang-router downloads {NAME}" in (look(config) or "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "share")
    with pytest.raises(
        ValueError, match=rf"{VARIABLE} must be a folder that holds {NAME}, .* got 'share': {path}: No "
    ):
        look(config)
    path.parent.mkdir()
    path.write_bytes(b"cut")
    with pytest.raises(ValueError, match=rf"{VARIABLE} 'share': {path} must be the file with .* got 3 bytes"):
        look(config)
    monkeypatch.setattr("slime_rl.engine.vocabulary.SHA256", hashlib.sha256(b"cut").hexdigest())
    assert look(config) == str(path)
    monkeypatch.setenv(VARIABLE, "nowhere")
    assert look(make_config(tmp_path)) is None
