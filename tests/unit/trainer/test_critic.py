"""PPO's critic in one real worker: what it learns, warm-up, its own size, checkpoint, and independence of the split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, open_worker
from slime_rl.data.ragged import Ragged

PPO = ("--advantage-estimator", "gae", "--critic-lr", "1e-2", "--gamma", "0.99", "--lambd", "0.95")


def slow_returns(rewards: list[float], values: Ragged, masks: Ragged, gamma: float, lambd: float) -> list[torch.Tensor]:
    """GAE's returns of every sample by a loop over its trained tokens, 0 on the others; float64."""
    rows = []
    for reward, value, mask in zip(rewards, values.rows(), masks.rows(), strict=True):
        out, advantage, following, given = torch.zeros(len(mask), dtype=torch.float64), 0.0, 0.0, False
        for t in reversed(range(len(mask))):
            if mask[t] == 0:
                continue
            r = 0.0 if given else reward
            given = True
            v = float(value[t])
            advantage = r + gamma * following - v + gamma * lambd * advantage
            out[t], following = advantage + v, v
        rows.append(out)
    return rows


def test_critic_starts_at_zero_and_learns_the_returns(model_path: Path) -> None:
    batch = make_batch()
    masks = batch.ragged("loss_mask")
    mask = masks.values
    with open_worker(make_config(model_path, *PPO)) as worker:
        assert torch.equal(worker.compute_values(batch), torch.zeros(len(mask)))
        worker.train(0, batch)
        values = worker.compute_values(batch)
        assert values.abs().min() > 0
        metrics = worker.train(1, batch)
        ragged = Ragged(values, masks.offsets)
        returns = torch.cat(slow_returns(batch.dense("rewards").tolist(), ragged, masks, 0.99, 0.95))
        wanted = (0.5 * (values.double() - returns).square() * mask).sum() / mask.sum()
        assert metrics["train/value_loss"] == pytest.approx(float(wanted), rel=1e-5)
        assert metrics["critic/returns_mean"] == pytest.approx(float(returns[mask > 0].mean()), rel=1e-5)
        later = [worker.train(2, batch)["critic/explained_variance"] for _ in range(15)]
        assert later[-1] > 0.5 > later[0]


def test_advantages_of_the_policy_come_from_the_values(model_path: Path) -> None:
    batch = make_batch()
    with open_worker(make_config(model_path, *PPO)) as worker:
        for step in range(3):
            worker.train(step, batch)
        values, masks = worker.compute_values(batch), batch.ragged("loss_mask")
        ragged = Ragged(values, masks.offsets)
        returns = torch.cat(slow_returns(batch.dense("rewards").tolist(), ragged, masks, 0.99, 0.95))
        advantages = (returns - values.double())[masks.values > 0]
        metrics = worker.train(3, batch)
    assert metrics["train/advantages_abs_mean"] == pytest.approx(float(advantages.abs().mean()), rel=1e-5)
    # One update: the ratio is 1, so the policy loss is minus the mean advantage.
    assert metrics["train/pg_loss"] == pytest.approx(-float(advantages.mean()), rel=1e-4)


def test_warm_up_trains_only_the_critic(model_path: Path) -> None:
    with open_worker(make_config(model_path, *PPO, "--critic-warmup-steps", "2")) as worker:
        before = {name: tensor.clone() for name, tensor in worker.export_weights()}
        for step in range(2):
            metrics = worker.train(step, make_batch(step))
            assert metrics["train/value_loss"] > 0 and "train/loss" not in metrics
        assert all(torch.equal(before[name], tensor) for name, tensor in worker.export_weights())
        assert worker.train(2, make_batch(2))["train/grad_norm"] > 0
        assert not all(torch.equal(before[name], tensor) for name, tensor in worker.export_weights())


def test_values_are_clipped_around_those_before_the_step(model_path: Path) -> None:
    flags = ["--num-updates-per-rollout", "2", "--num-epochs-per-rollout", "2", "--critic-lr", "0.1"]
    fractions = {}
    for clip in ("0", "0.01"):
        with open_worker(make_config(model_path, *PPO, *flags, "--value-clip", clip)) as worker:
            worker.train(0, make_batch(0, updates=2))
            fractions[clip] = worker.train(1, make_batch(1, updates=2))["train/value_clipfrac"]
    assert fractions["0"] == 0 < fractions["0.01"]


def test_value_loss_and_gradient_do_not_depend_on_the_split(model_path: Path) -> None:
    flags = ["--loss-aggregation", "seq-mean-token-mean"]
    results = []
    for split in (["--micro-batch-size", "12"], ["--micro-batch-size", "1"], ["--max-tokens-per-worker", "96"]):
        with open_worker(make_config(model_path, *PPO, *flags, *split)) as worker:
            worker.train(0, make_batch(0))
            metrics = worker.train(1, make_batch(1))
            results.append((metrics["train/value_loss"], metrics["critic/grad_norm"]))
    for loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-5)


@pytest.mark.parametrize("in_background", [False, True])
def test_critic_of_another_size_resumes_exactly(model_path: Path, tmp_path: Path, in_background: bool) -> None:
    make_checkpoint(tmp_path / "critic", "llama", num_hidden_layers=1, hidden_size=40)
    flags = ["--critic-load", str(tmp_path / "critic")]
    with open_worker(make_config(model_path, *PPO, *flags)) as worker:
        worker.train(0, make_batch(0))
        if in_background:
            worker.begin_save(tmp_path / "saved", 1, {})
        else:
            worker.save(tmp_path / "saved", 1, {})
        whole = worker.train(1, make_batch(1))
        if in_background:
            worker.finish_save()
    with open_worker(make_config(model_path, *PPO, *flags)) as worker:
        worker.load(tmp_path / "saved")
        resumed = worker.train(1, make_batch(1))
    for name in ("train/loss", "train/value_loss", "critic/grad_norm", "critic/lr", "critic/explained_variance"):
        assert resumed[name] == whole[name], name


def test_model_with_tied_embeddings_can_be_the_critic(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tied", num_hidden_layers=1, tie_word_embeddings=True)
    with open_worker(make_config(tmp_path / "tied", *PPO)) as worker:
        first = worker.train(0, make_batch(0))
        worker.save(tmp_path / "saved", 1, {})
        assert worker.train(0, make_batch(0))["train/value_loss"] < first["train/value_loss"]


def test_values_without_a_critic_are_refused(model_path: Path) -> None:
    message = "only --advantage-estimator gae has one"
    with open_worker(make_config(model_path)) as worker, pytest.raises(ValueError, match=message):
        worker.compute_values(make_batch())


def test_critic_flags_without_a_critic_are_refused(model_path: Path) -> None:
    with pytest.raises(ValueError, match="--critic-lr needs --advantage-estimator gae"):
        make_config(model_path, "--critic-lr", "1e-3")


def test_a_policy_that_waits_for_its_critic_is_saved_and_resumed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", num_hidden_layers=1)

    def weights_after(steps: list[int], *, load: bool = False, save: bool = False) -> list[torch.Tensor]:
        flags = ["--advantage-estimator", "gae", "--critic-warmup-steps", "2"]
        with open_worker(make_config(tmp_path / "model", *flags)) as worker:
            if load:
                worker.load(tmp_path / "saved")
            for step in steps:
                worker.train(step, make_batch(step))
            if save:
                worker.save(tmp_path / "saved", 1, {})
            return [tensor.clone() for _, tensor in worker.export_weights()]

    unbroken = weights_after([0, 1, 2])
    weights_after([0], save=True)
    assert all(map(torch.equal, unbroken, weights_after([1, 2], load=True)))
