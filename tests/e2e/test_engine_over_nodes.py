"""One engine whose tensor-parallel ranks are on two nodes, which here are two servers on one machine."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from e2e_runs import base_flags, start_train, train_metrics

FOLLOWER = "engine_0_node_1"


def test_it_serves_gets_weights_and_is_replaced_when_a_node_fails(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    flags = ["--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus-per-node", "1", "--weight-sync", "distributed"]
    flags += ["--num-steps", "12", "--engine-health-interval-s", "0.5", "--engine-health-first-wait-s", "1"]
    driver = start_train([*base_flags(quickstart_data, run_dir), *flags], log)
    try:
        deadline = time.monotonic() + 180
        while not (run_dir / "metrics.jsonl").exists() or len(train_metrics(run_dir)) < 2:
            assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        follower_of(driver.pid).kill()
        assert driver.wait(timeout=300) == 0, log.read_text()
    finally:
        driver.kill()
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(12))
    assert all(line["train/logprob_diff_max_abs"] < 1e-4 for line in metrics)
    assert (run_dir / "logs" / f"{FOLLOWER}.log").exists() and (run_dir / "logs" / f"{FOLLOWER}.1.log").exists()
    assert "(node 1 of 2) " in (run_dir / "logs" / "faults.log").read_text()


def follower_of(driver: int) -> psutil.Process:
    """The server on the second node, of whichever process below the driver."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if "--node-rank=1" in process.cmdline() and "supervise.py" not in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            continue
    raise AssertionError("no process has --node-rank=1")
