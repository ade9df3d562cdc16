"""A second model served beside the policy scores its answers: engines, router and weights of its own."""

from __future__ import annotations

import json
from pathlib import Path

from e2e_runs import base_flags, run_train, train_metrics


def test_a_judge_beside_the_policy_scores_and_keeps_its_weights(quickstart_data: Path, tmp_path: Path) -> None:
    models = [
        {"name": "policy", "server_groups": [{"num_gpus": 1}]},
        {"name": "judge", "model_path": str(quickstart_data / "model"), "server_groups": [{"num_gpus": 1}]},
    ]
    (tmp_path / "serving.yaml").write_text(json.dumps({"sglang": models}))
    (tmp_path / "rubric").write_text("{response}")
    run_dir = tmp_path / "run"
    judge = ("--rm-type", "judge", "--reward-url", "sglang:judge", "--judge-prompt", str(tmp_path / "rubric"))
    flags = ("--sglang-config", str(tmp_path / "serving.yaml"), "--judge-max-tokens", "4", "--log-samples", "16")
    result = run_train([*base_flags(quickstart_data, run_dir), *judge, *flags, "--num-steps", "3"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line["step"] for line in train_metrics(run_dir)] == [0, 1, 2]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    verdicts: dict[str, set[str]] = {}
    for sample in samples:  # a model of the quickstart knows digits only, so no verdict can be read
        assert (sample["reward"], sample["reward_info"]["judge_unreadable"]) == (0.0, 1.0)
        verdicts.setdefault(sample["response"], set()).add(sample["reward_info"]["verdict"])
    assert len(samples) == 48 and any(verdict for found in verdicts.values() for verdict in found)
    assert all(len(found) == 1 for found in verdicts.values())  # the policy trains, the judge stays as it is
    assert (run_dir / "logs" / "router_judge.log").exists()
