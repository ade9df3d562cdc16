"""Prompts are computed by one engine, responses by another, which gets the prompt's KV cache from it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from e2e_runs import base_flags, run_with_kills, server_with, train_metrics
from factories import make_config
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.engine import arguments
from slime_rl.engine.ports import free_port
from slime_rl.engine.server import EngineServer

KINDS = ["prefill", "decode"]


def test_both_serve_get_weights_and_are_replaced(quickstart_data: Path, tmp_path: Path) -> None:
    groups = [{"num_gpus": 1, "worker_type": worker_type} for worker_type in KINDS]
    serving, run_dir = tmp_path / "serving.yaml", tmp_path / "run"
    serving.write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": groups}]}))
    flags = ["--sglang-config", str(serving), "--reward-function-path", "run_plugins:every_second", "--num-steps", "7"]
    flags += ["--log-samples", "16", *base_flags(quickstart_data, run_dir)]
    kills = {
        2 * (number + 1): lambda driver, kind=kind: server_with(f"--disaggregation-mode={kind}", driver)
        for number, kind in enumerate(KINDS)
    }
    run_with_kills(flags, kills)
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(7))
    assert all(line["train/grad_norm"] > 0 and line["train/logprob_diff_max_abs"] < 1e-4 for line in metrics)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    found = {(line["step"], version) for line in samples for version in line["weight_versions"]}
    assert found == {(step, step) for step in range(7)}
    faults = (run_dir / "logs" / "faults.log").read_text()
    assert "engine 0 serves again" in faults and "engine 1 serves again" in faults


def test_a_prefill_engine_whose_port_for_decode_engines_is_taken_starts_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [{"num_gpus": 1, "worker_type": worker_type} for worker_type in KINDS]
    (tmp_path / "serving.yaml").write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": groups}]}))
    flags = ("--hf-checkpoint", str(write_tiny_checkpoint(tmp_path / "tiny")), "--max-prompt-len", "64")
    flags += ("--max-response-len", "64", "--sglang-config", str(tmp_path / "serving.yaml"))
    config = make_config(tmp_path, *flags)
    policy = config.served_models[0]
    engine = EngineServer(config.for_engine(policy, policy.groups[0]), 0, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ports = [stranger.getsockname()[1], free_port()]
        monkeypatch.setattr(arguments, "free_port", lambda host: ports.pop(0))
        try:
            engine.start()
            assert ports == [] and not engine.port_was_taken()
        finally:
            engine.stop()
