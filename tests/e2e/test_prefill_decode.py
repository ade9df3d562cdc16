"""Prompts are computed by one engine, responses by another, which gets the prompt's KV cache from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_runs import base_flags, killed_after, server_with, train_metrics

KINDS = ["prefill", "decode"]


@pytest.mark.parametrize("kind", KINDS)
def test_both_serve_get_weights_and_are_replaced(quickstart_data: Path, tmp_path: Path, kind: str) -> None:
    groups = [{"num_gpus": 1, "worker_type": worker_type} for worker_type in KINDS]
    serving, run_dir = tmp_path / "serving.yaml", tmp_path / "run"
    serving.write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": groups}]}))
    flags = ["--sglang-config", str(serving), "--reward-function-path", "run_plugins:every_second", "--num-steps", "6"]
    flags += ["--log-samples", "16", *base_flags(quickstart_data, run_dir)]
    killed_after(2, flags, lambda pid: server_with(f"--disaggregation-mode={kind}", pid))
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(6))
    assert all(line["train/grad_norm"] > 0 and line["train/logprob_diff_max_abs"] < 1e-4 for line in metrics)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    found = {(line["step"], version) for line in samples for version in line["weight_versions"]}
    assert found == {(step, step) for step in range(6)}
    assert f"engine {KINDS.index(kind)} serves again" in (run_dir / "logs" / "faults.log").read_text()
