"""PPO through the whole loop: warm-up of the critic, checkpoint, resume with a critic apart, loss of its worker."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from e2e_runs import LIMIT_S, base_flags, run_train, start_train, train_metrics

STEPS = 6


def test_ppo_trains_its_critic_and_resumes_with_it(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*base_flags(quickstart_data, run_dir), "--advantage-estimator", "gae", "--critic-lr", "1e-3"]
    flags += ["--critic-warmup-steps", "1", "--kl-coef", "0.01", "--save-interval", "2", "--n-samples-per-prompt", "1"]
    flags += ["--rollout-batch-size", "8", "--reward-function-path", "run_plugins:every_second"]
    first = run_train([*flags, "--num-steps", "2"])
    assert first.returncode == 0, first.stdout + first.stderr
    flags += ["--num-steps", str(STEPS), "--load", str(run_dir / "checkpoints"), "--critic-num-workers", "1"]
    code = finish_without_critic_worker(flags, run_dir, tmp_path / "log")
    assert code == 0, (tmp_path / "log").read_text()
    steps = train_metrics(run_dir, having="train/value_loss")
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert "train/loss" not in steps[0] and "train/loss" in steps[1] and "train/kl_reward" in steps[2]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    # A critic that has not learnt anything yet, or had started anew, has values of exactly 0.
    assert steps[0]["train/value_mean"] == 0 != steps[2]["train/value_mean"]
    assert "critic worker 0 has died" in (run_dir / "logs" / "faults.log").read_text()
    assert steps[-1]["faults/train_restarts"] == 1


def finish_without_critic_worker(flags: list[str], run_dir: Path, log: Path) -> int:
    """Run, kill the critic's worker once it has trained, and give the exit code."""
    driver = start_train(flags, log)
    try:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and len(train_metrics(run_dir, having="train/value_loss")) < 3:
            assert driver.poll() is None, log.read_text()
            time.sleep(0.1)
        critics = [p for p in psutil.Process(driver.pid).children(recursive=True) if is_critic(p)]
        min(critics, key=lambda process: process.pid).kill()  # a look may catch one as it forks
        return driver.wait(timeout=LIMIT_S)
    finally:
        driver.kill()


def is_critic(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::CriticActor") for word in process.cmdline())
    except psutil.Error:
        return False  # ended while we looked
