"""What training saw of the shown samples, token by token, and that it does not depend on how work is split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.trainer_cases import Job, make_batch, make_config, open_worker, run_jobs
from slime_rl.data.ragged import Ragged
from slime_rl.observability import tracker

SHOWN = ["--log-samples", "5"]


def test_log_probs_are_those_that_the_update_saw_and_advantages_those_of_the_loss(model_path: Path) -> None:
    batch = make_batch()
    with open_worker(make_config(model_path, *SHOWN, "--advantage-estimator", "grpo")) as worker:
        before = Ragged.from_lengths(worker.compute_log_probs(batch), batch.response_lengths)
        worker.train(0, batch)
        log = worker.token_log()
    assert sorted(log) == [0, 1, 2, 3, 4]
    rewards = batch.dense("rewards")
    for sample, numbers in log.items():
        assert numbers.keys() == {"train_log_probs", "train_mask", "advantages"}  # one update: old is current
        assert numbers["train_log_probs"] == pytest.approx(before.rows()[sample].tolist(), abs=1e-5)
        assert numbers["train_mask"] == batch.ragged("loss_mask").rows()[sample].tolist()
        group = rewards[sample // 3 * 3 : sample // 3 * 3 + 3]
        expected = float((rewards[sample] - group.mean()) / (group.std() + 1e-6))
        trained = [a for a, mask in zip(numbers["advantages"], numbers["train_mask"], strict=True) if mask]
        assert trained == pytest.approx([expected] * len(trained), rel=1e-3)


def test_log_probs_of_a_later_update_are_of_weights_that_earlier_ones_have_moved(model_path: Path) -> None:
    flags = ["--num-updates-per-rollout", "2", "--num-epochs-per-rollout", "2", "--lr", "0.05", "--log-samples", "12"]
    with open_worker(make_config(model_path, *flags)) as worker:
        worker.train(0, make_batch(updates=2))
        log = worker.token_log()

    def moved(sample: int) -> float:
        pairs = zip(log[sample]["train_log_probs"], log[sample]["old_log_probs"], strict=True)
        return max(abs(now - old) for now, old in pairs)

    assert max(map(moved, range(6))) < 1e-5 < 1e-2 < min(map(moved, range(6, 12)))


def test_truncated_samples_that_do_not_train_are_told(model_path: Path) -> None:
    batch = make_batch()
    batch.dense("truncated")[1] = True
    with open_worker(make_config(model_path, *SHOWN, "--overlong-filter")) as worker:
        worker.train(0, batch)
        log = worker.token_log()
    assert sum(log[1]["train_mask"]) == 0 < sum(log[0]["train_mask"])


@pytest.mark.parametrize("off", [["--no-log-token-training", *SHOWN], ["--log-samples", "0"]])
def test_off_watches_nothing(model_path: Path, off: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_worker(make_config(model_path, *off)) as worker:
        monkeypatch.setattr("slime_rl.trainer.update.watched", pytest.fail)
        worker.train(0, make_batch())
        assert worker.token_log() == {}


def test_supervised_tokens_have_log_probs_and_no_advantage(model_path: Path) -> None:
    with open_worker(make_config(model_path, "--loss", "sft", *SHOWN, groups=12, samples=1)) as worker:
        worker.train(0, make_batch(groups=12, samples=1))
        assert worker.token_log()[0].keys() == {"train_log_probs", "train_mask"}


def test_steps_that_do_not_train_the_policy_leave_nothing_of_the_step_before(model_path: Path) -> None:
    flags = ["--advantage-estimator", "gae", "--critic-warmup-steps", "1", *SHOWN]
    with open_worker(make_config(model_path, *flags)) as worker:
        worker.state.token_log = {0: {"train_log_probs": [0.0]}}
        worker.train(0, make_batch())
        assert worker.token_log() == {}


def test_long_responses_are_cut_where_their_texts_are(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracker.MAX_LOGGED_TOKENS == 2048
    with open_worker(make_config(model_path, *SHOWN)) as worker:
        monkeypatch.setattr("slime_rl.trainer.token_log.MAX_LOGGED_TOKENS", 7)
        worker.train(0, batch := make_batch())
        log = worker.token_log()
    lengths = [min(7, length) for length in batch.response_lengths[:5].tolist()]
    assert [len(log[sample]["advantages"]) for sample in range(5)] == lengths


@pytest.mark.parametrize(
    "split",
    [
        [],
        ["--tensor-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size", "2"],
        ["--context-parallel-size", "2"],
    ],
    ids=["dp2", "tp2", "pp2", "cp2"],
)
def test_two_workers_log_what_one_does(model_path: Path, split: list[str]) -> None:
    flags = [*SHOWN, "--num-updates-per-rollout", "2"]
    with open_worker(make_config(model_path, *flags)) as worker:
        worker.train(0, make_batch(updates=2))
        whole = worker.token_log()
    config = make_config(model_path, *flags, *split, workers=2)
    [outcome] = run_jobs([Job(config, [make_batch(updates=2)], shuffle=True)], 2)
    assert outcome.token_log.keys() == whole.keys()
    for sample, numbers in whole.items():
        for name, values in numbers.items():
            there = torch.tensor(outcome.token_log[sample][name])
            assert torch.allclose(there, torch.tensor(values), atol=2e-5), (sample, name)
