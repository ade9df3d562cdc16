from __future__ import annotations

import json
from pathlib import Path

from e2e_runs import base_flags, run_train, train_metrics

EQUAL = ("train/loss", "train/grad_norm", "train/logprob_diff_mean_abs", "rollout/response_length_mean")


def test_two_deterministic_runs_are_equal_bit_for_bit(quickstart_data: Path, tmp_path: Path) -> None:
    """One synchronous, one fully asynchronous with staleness 0, which must give the same batches; two engines each."""
    found = []
    for name, mode in (("sync", []), ("async", ["--fully-async", "--max-staleness", "0"])):
        run_dir = tmp_path / name
        flags = [*base_flags(quickstart_data, run_dir), *mode, "--deterministic", "--num-steps", "3"]
        flags += ["--log-samples", "16", "--rollout-num-engines", "2", "--entropy-coef", "0.01"]
        result = run_train([*flags, "--off-policy-correction", "tis_token"])
        assert result.returncode == 0, result.stdout + result.stderr
        samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
        texts = [(s["step"], s["group_index"], s["response"]) for s in samples]
        found.append((texts, [[line[key] for key in EQUAL] for line in train_metrics(run_dir)]))
    assert found[0] == found[1]
    texts, metrics = found[0]
    assert len(metrics) == 3 and len(texts) == 48
    assert len({text for _, _, text in texts}) > 24  # samples of a prompt differ: each has its own seed
