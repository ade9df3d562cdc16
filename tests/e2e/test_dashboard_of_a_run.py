"""The dashboard on a real run, first live and then finished, in a real browser."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dashboard_site import get, look, open_browser, serve
from e2e_runs import LIMIT_S, base_flags, start_train

VIEWS = {
    "overview": ["accuracy · heldout", "rollout/reward_mean", "train/loss"],
    "time": ["driver · phases", "trainer_0 · training", "engine_0 · requests", "rollout · requests", "idle: a bubble"],
    "data": ["response length", "age of trained tokens", "8 samples (--log-samples)", "committed"],
    "engines": ["serving", "none: no engine, router or worker was replaced", "engine_0.log"],
    "rollouts&colour=ratio": ["4 samples logged", "furthest from 1 on this page"],
    "rollouts&colour=advantage": ["4 samples logged", "advantage"],
    "rollouts&view=conversation": ["user", "assistant"],
    "compare": ["heldout"],
}


def test_a_run_is_shown_live_and_finished_with_what_training_saw(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    evaluation = ["--eval-prompt-data", "heldout", str(quickstart_data / "heldout.jsonl")]
    flags = [*base_flags(quickstart_data, run_dir), *evaluation, "--trace", "--log-samples", "8", "--num-steps", "4"]
    process = start_train([*flags, "--num-updates-per-rollout", "2"], tmp_path / "run.log")
    try:
        while not (run_dir / ".lock").exists():
            assert process.poll() is None, (tmp_path / "run.log").read_text()
            time.sleep(0.1)
        with serve([run_dir]) as url, open_browser() as browser:
            while get(f"{url}/api/runs")[0]["state"] != "running":  # told by its lock: nothing is written yet
                assert process.poll() is None, (tmp_path / "run.log").read_text()
            look(browser, url, "tab=overview")
            browser.wait("return document.getElementById('main').innerText.includes('4 of 4 steps')", timeout_s=LIMIT_S)
            assert process.wait(LIMIT_S) == 0, (tmp_path / "run.log").read_text()
            browser.wait("return document.getElementById('state').innerText === 'finished'")
            for address, shown in VIEWS.items():
                text = look(browser, url, f"tab={address}")
                assert [words for words in shown if words not in text] == [], (address, text)
    finally:
        process.kill()
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if sample["kind"] == "training"]
    assert len(trained) == 4 * 8 and len(samples) > len(trained)
    for sample in trained:
        assert sample["train_mask"] == sample["loss_mask"] and len(sample["advantages"]) == sample["response_length"]
        gap = [abs(now - then) for now, then in zip(sample["train_log_probs"], sample["log_probs"], strict=True)]
        assert max(gap) < 1e-4  # they are all of the first of two updates, which has the weights that sampled
