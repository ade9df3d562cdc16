"""Command lines of engine and router, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from factories import make_config, write_prompts
from tiny_checkpoint import quantize_checkpoint, write_tiny_checkpoint

from slime_rl.config import Config
from slime_rl.engine.arguments import (
    _check_replicas,
    check_context_length,
    check_quantization,
    check_router_args,
    check_sglang_args,
    check_transfer,
    disaggregation_arguments,
    sglang_arguments,
)
from slime_rl.engine.router import router_arguments

FITS = ("--max-prompt-len", "100", "--max-response-len", "156")  # 256 positions in the factory's model


def engine_arguments(tmp_path: Path, *flags: str, device: str = "cpu", index: int = 0) -> list[str]:
    return sglang_arguments(make_config(tmp_path, *flags), index, device, "127.0.0.1", 1234)  # type: ignore[arg-type]


def test_engine_arguments_follow_our_flags(tmp_path: Path) -> None:
    flags = (
        "--train-dtype",
        "bfloat16",
        "--seed",
        "10",
        "--rollout-num-gpus-per-engine",
        "2",
        "--engine-mem-fraction",
        "0.3",
    )
    arguments = engine_arguments(tmp_path, *flags, index=3)
    expected = {"--dtype=bfloat16", "--random-seed=13", "--tp-size=2", "--mem-fraction-static=0.3", "--port=1234"}
    assert expected <= set(arguments)
    assert "--weight-version=0" in arguments
    assert f"--model-path={tmp_path / 'model'}" in arguments


def test_cpu_and_cuda_engines_differ_in_backend_and_schedule(tmp_path: Path) -> None:
    cpu, cuda = engine_arguments(tmp_path), engine_arguments(tmp_path, device="cuda")
    assert {"--attention-backend=torch_native", "--sleep-on-idle", "--disable-overlap-schedule"} <= set(cpu)
    assert not any(a.startswith(("--attention-backend", "--sleep-on-idle", "--disable-overlap")) for a in cuda)


def test_deterministic_engines_run_requests_of_fixed_shapes(tmp_path: Path) -> None:
    cpu, cuda = (engine_arguments(tmp_path, "--deterministic", device=device) for device in ("cpu", "cuda"))
    assert {"--max-running-requests=1", "--disable-radix-cache"} <= set(cpu)
    assert "--enable-deterministic-inference" in cuda and "--enable-deterministic-inference" not in cpu


def test_in_place_updates_run_without_prefix_cache(tmp_path: Path) -> None:
    in_place = engine_arguments(tmp_path, "--weight-update-mode", "in_place", device="cuda")
    assert {"--disable-radix-cache", "--disable-overlap-schedule"} <= set(in_place)
    assert "--disable-radix-cache" not in engine_arguments(tmp_path, device="cuda")


def test_fp8_engines_compute_in_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    model = quantize_checkpoint(write_tiny_checkpoint(tmp_path / "fp8"), 16, 16)
    path = ("--hf-checkpoint", str(model))
    assert "--dtype=bfloat16" in engine_arguments(tmp_path, *path, device="cuda")
    assert "--dtype=float16" in engine_arguments(tmp_path, *path, "--engine-dtype", "float16", device="cuda")
    assert "--dtype=float32" in engine_arguments(tmp_path, *path)
    assert check_quantization(make_config(tmp_path, *path), "cuda") == "fp8 in blocks of 16x16: 14 weights"
    with pytest.raises(
        ValueError, match=r"--engine-dtype must be bfloat16 or float16 where .*fp8/config\.json has a quant"
    ):
        check_quantization(make_config(tmp_path, *path, "--engine-dtype", "float32"), "cuda")
    groups = [{"num_gpus": 1}, {"num_gpus": 8, "num_gpus_per_engine": 8}]
    (tmp_path / "sizes.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    with pytest.raises(ValueError, match="on each of the 8 ranks of an engine"):
        check_quantization(make_config(tmp_path, *path, "--sglang-config", str(tmp_path / "sizes.yaml")), "cpu")


def test_users_own_arguments_come_last(tmp_path: Path) -> None:
    assert engine_arguments(tmp_path, "--sglang-log-level", "error")[-2:] == ["--log-level", "error"]
    arguments = router_arguments(make_config(tmp_path, "--router-log-level", "debug"), "127.0.0.1", 1, 2)
    assert arguments[-2:] == ["--log-level", "debug"]


def test_router_notices_dead_engines_within_the_health_timeout(tmp_path: Path) -> None:
    arguments = router_arguments(make_config(tmp_path, "--engine-health-timeout-s", "30"), "127.0.0.1", 1, 2)
    values = dict(a.removeprefix("--").split("=") for a in arguments if "=" in a)
    interval, timeout = int(values["health-check-interval-secs"]), int(values["health-check-timeout-secs"])
    assert int(values["health-failure-threshold"]) * (interval + timeout) <= 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--router-cache-treshold", "0.5"), "--router-cache-treshold.*did you mean --router-cache-threshold"),
        (("--router-cache-threshold", "many"), "sglang-router refuses.*invalid float value: 'many'"),
        (("--router-prometheus-port", "3"), "--router-prometheus-port cannot be passed through: the run chooses it"),
        (("--router-request-timeout-secs", "3"), "cannot be passed through: use --request-timeout-s"),
    ],
)
def test_bad_router_arguments_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_router_args(make_config(tmp_path, *flags))


def test_good_router_arguments_pass(tmp_path: Path) -> None:
    check_router_args(make_config(tmp_path, "--router-cache-threshold", "0.5", "--router-dp-aware"))


def test_without_passed_arguments_sglang_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    check_sglang_args(make_config(tmp_path))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"unknown": ["--chunked-prefil-size", "8"]}, "did you mean --sglang-chunked-prefill-size"),
        (
            {"error": "argument --chunked-prefill-size: invalid int value: 'x'"},
            "SGLang refuses.*invalid int value: 'x'",
        ),
    ],
)
def test_what_sglang_says_becomes_an_error_about_our_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], message: str
) -> None:
    said = {"options": {"--chunked-prefill-size": "chunked_prefill_size"}, "unknown": [], "error": None, **answer}
    finished = subprocess.CompletedProcess([], 0, stdout="noise\n" + json.dumps(said) + "\n", stderr="")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: finished)
    flag = "--sglang-chunked-prefil-size" if "unknown" in answer else "--sglang-chunked-prefill-size"
    with pytest.raises(ValueError, match=message):
        check_sglang_args(make_config(tmp_path, flag, "8"))


def test_arguments_are_asked_for_where_the_gpus_of_the_run_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        said = {"options": {"--page-size": "page_size"}, "unknown": [], "error": None}
        return subprocess.CompletedProcess([], 0, stdout=json.dumps(said), stderr="")

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("slime_rl.engine.device.DRIVER_FILES", ())
    check_sglang_args(make_config(tmp_path, "--device", "cuda", "--sglang-page-size", "8"))
    assert commands[0][commands[0].index("check") + 1] == "cpu"


@pytest.mark.parametrize("name", ["--dp-size=2", "--data-parallel-size=2"])
def test_an_engine_is_one_copy_of_the_model(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--sglang-\*: {name[:-2]} must be 1 without .* got 2"):
        _check_replicas("--sglang-*: ", [name])
    _check_replicas("", [name, "--enable-dp-attention"])
    _check_replicas("", ["--dp-size", "1"])


def test_a_sequence_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    check_context_length(make_config(tmp_path, *FITS))
    with pytest.raises(ValueError, match=r"\(101 \+ 156 = 257\) is more than the 256 positions of the model"):
        check_context_length(make_config(tmp_path, *FITS, "--max-prompt-len", "101"))
    with pytest.raises(ValueError, match=r"\(100 \+ 200 = 300\) is more than the 256 positions"):
        check_context_length(make_config(tmp_path, *FITS, "--eval-max-response-len", "200"))
    held = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl")))
    with pytest.raises(ValueError, match=r"\(100 \+ 300 = 400\) is more than the 256 positions"):
        check_context_length(make_config(tmp_path, *FITS, *held, "--eval-override", "held:eval-max-response-len=300"))


def test_an_explicit_context_length_counts_instead(tmp_path: Path) -> None:
    longer = (*FITS, "--max-prompt-len", "200")
    check_context_length(make_config(tmp_path, *longer, "--sglang-context-length", "512"))
    check_context_length(make_config(tmp_path, *longer, "--sglang-context-length=512"))


def test_a_sequence_longer_than_the_kv_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"an engine's cache \(--engine-max-total-tokens\), got 200"):
        check_context_length(make_config(tmp_path, *FITS, "--engine-max-total-tokens", "200"))


def test_the_router_does_not_repeat_what_prefill_and_decode_engines_aborted(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert "--disable-retries" not in router_arguments(config, "h", 1, 2)
    assert {"--disable-retries", "--pd-disaggregation"} <= set(router_arguments(config, "h", 1, 2, disaggregated=True))


def test_episodes_begin_on_the_engine_with_least_to_do(tmp_path: Path) -> None:
    arguments = router_arguments(make_config(tmp_path, "--router-policy", "manual"), "127.0.0.1", 1, 2)
    assert "--policy=manual" in arguments and "--assignment-mode=min_load" in arguments
    assert "--assignment-mode=min_load" not in router_arguments(make_config(tmp_path), "127.0.0.1", 1, 2)


def test_prefill_engines_on_gpus_need_a_way_to_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    def config_of(overrides: str) -> Config:
        groups = [f"{{num_gpus: 1, worker_type: {kind}{overrides}}}" for kind in ("prefill", "decode")]
        (tmp_path / "engines.yaml").write_text(f"sglang: [{{name: p, server_groups: [{', '.join(groups)}]}}]")
        return make_config(tmp_path, "--sglang-config", str(tmp_path / "engines.yaml"))

    with pytest.raises(ValueError, match=r"--sglang-config .*: p: prefill and decode engines need Mooncake"):
        check_transfer(config_of(""), "cuda")
    check_transfer(config_of(""), "cpu")
    check_transfer(config_of(", overrides: {disaggregation-transfer-backend: nixl}"), "cuda")
    with pytest.raises(
        ValueError, match="--disaggregation-transfer-backend must not be nixl, which does not work on CPU"
    ):
        check_transfer(config_of(", overrides: {disaggregation-transfer-backend: nixl}"), "cpu")
    with pytest.raises(ValueError, match="must not be fake, which sends no caches"):
        check_transfer(config_of(", overrides: {disaggregation-transfer-backend: fake}"), "cuda")


def test_what_an_engine_of_two_kinds_is_told(tmp_path: Path) -> None:
    groups = [f"{{num_gpus: 1, worker_type: {kind}}}" for kind in ("prefill", "decode")]
    (tmp_path / "engines.yaml").write_text(f"sglang: [{{name: p, server_groups: [{', '.join(groups)}]}}]")
    config = make_config(tmp_path, "--sglang-config", str(tmp_path / "engines.yaml"))
    (policy,) = config.served_models
    prefill, decode = (config.for_engine(policy, group) for group in policy.groups)
    ((told),) = disaggregation_arguments(prefill, "cuda", "127.0.0.1")
    assert told.startswith("--disaggregation-bootstrap-port=")
    assert disaggregation_arguments(decode, "cuda", "127.0.0.1") == []
    assert disaggregation_arguments(decode, "cpu", "127.0.0.1") == [
        "--disaggregation-decode-retraction-backup=cpu_tensor"
    ]
    assert disaggregation_arguments(config, "cpu", "127.0.0.1") == []
