"""PPO with a critic through the whole loop: warm-up, values, checkpoint and resume."""

from __future__ import annotations

from pathlib import Path

from e2e_runs import base_flags, run_train, train_metrics


def test_ppo_trains_its_critic_and_resumes_with_it(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*base_flags(quickstart_data, run_dir), "--advantage-estimator", "gae", "--critic-lr", "1e-3"]
    flags += ["--critic-warmup-steps", "1", "--kl-coef", "0.01", "--save-interval", "2", "--n-samples-per-prompt", "1"]
    flags += ["--rollout-batch-size", "8", "--reward-function-path", "run_plugins:every_second"]
    first = run_train([*flags, "--num-steps", "2"])
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_train([*flags, "--num-steps", "3", "--load", str(run_dir / "checkpoints")])
    assert second.returncode == 0, second.stdout + second.stderr
    steps = train_metrics(run_dir, having="train/value_loss")
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert "train/loss" not in steps[0] and "train/loss" in steps[1] and "train/kl_reward" in steps[2]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    # A critic that has not learnt anything yet, or had started anew, has values of exactly 0.
    assert steps[0]["train/value_mean"] == 0 != steps[2]["train/value_mean"]
