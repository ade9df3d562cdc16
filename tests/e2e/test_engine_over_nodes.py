"""One engine whose tensor-parallel ranks are on two nodes, which here are two servers on one machine."""

from __future__ import annotations

from pathlib import Path

from e2e_runs import base_flags, run_with_kills, server_with, train_metrics

FOLLOWER = "engine_0_node_1"


def test_it_serves_gets_weights_and_is_replaced_when_a_node_fails(quickstart_data: Path, tmp_path: Path) -> None:
    flags = ["--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus-per-node", "1", "--weight-sync", "distributed"]
    flags += ["--reward-function-path", "run_plugins:every_second", "--num-steps", "5"]
    run_dir = tmp_path / "run"
    flags = [*base_flags(quickstart_data, run_dir), *flags]
    before = set(Path("/dev/shm").glob("sgl_shm_*"))
    run_with_kills(flags, {2: lambda driver: server_with("--node-rank=1", driver)})
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(5))
    assert all(line["train/grad_norm"] > 0 and line["train/logprob_diff_max_abs"] < 1e-4 for line in metrics)
    assert (run_dir / "logs" / f"{FOLLOWER}.log").exists() and (run_dir / "logs" / f"{FOLLOWER}.1.log").exists()
    assert set(Path("/dev/shm").glob("sgl_shm_*")) <= before
    assert "(node 1 of 2) " in (run_dir / "logs" / "faults.log").read_text()
