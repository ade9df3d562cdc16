"""Prompts are computed by one engine, responses by another, which gets the prompt's KV cache from it."""

from __future__ import annotations

import json
from pathlib import Path

from e2e_runs import base_flags, run_with_kills, server_with, train_metrics

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
