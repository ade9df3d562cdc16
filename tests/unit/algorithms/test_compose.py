"""The composed loss of a token, and its sums over a split update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import slow_losses
import torch
from algorithm_batches import GROUPS, IDS, MASK, MASKS, ROLLOUTS, loss_batch, unmasked

from slime_rl.algorithms.aggregation import token_weights
from slime_rl.algorithms.batch import LossBatch, LossOutput, OffPolicyOutput
from slime_rl.algorithms.compose import compose_loss
from slime_rl.algorithms.metrics import finish_metrics, is_maximum, token_metrics
from slime_rl.algorithms.off_policy import icepop, none
from slime_rl.algorithms.policy_losses.clip import ppo_clip
from slime_rl.algorithms.registry import POLICY_LOSSES
from slime_rl.config import Config

Make = Callable[..., Config]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"]


def test_parts_add_up_and_rejected_tokens_are_zero(algo: Make) -> None:
    batch = loss_batch()
    config = algo(use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", entropy_coef=0.1, off_policy_upper=1.3)
    output = compose_loss(config, batch, ppo_clip, icepop)
    rows = unmasked(batch)
    want = [0.0] * len(IDS)
    for t, surrogate in zip(rows, slow_losses.ppo_clip(config.algorithm, rows, rows), strict=True):
        ratio, x = math.exp(t.old - t.rollout), t.theta - t.ref
        if 0.5 <= ratio <= 1.3:
            want[t.index] = ratio * surrogate + 0.2 * (math.exp(-x) - 1 + x) - 0.1 * t.entropy
    assert output.loss.tolist() == pytest.approx(want, rel=1e-9)
    m = output.metrics
    rebuilt = m["pg_loss"] + 0.2 * m["kl_loss"] - 0.1 * m["entropy"]
    torch.testing.assert_close(rebuilt, output.loss)
    assert torch.equal(m["loss"], output.loss)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_unbiased", "abs"])
def test_kl_in_the_loss_has_a_gradient(algo: Make, kind: str) -> None:
    batch = loss_batch()
    log_probs = batch.log_probs.clone().requires_grad_()
    batch = dataclasses.replace(batch, log_probs=log_probs, advantages=torch.zeros_like(log_probs))
    config = algo(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind)
    (gradient,) = torch.autograd.grad(compose_loss(config, batch, ppo_clip, none).loss.sum(), log_probs)
    slopes = {
        "k1": lambda x: 1.0,
        "k2": lambda x: x,
        "k3": lambda x: 1 - math.exp(-x),
        "k3_unbiased": lambda x: x,
        "abs": lambda x: math.copysign(1, x),
    }
    want = [0.0] * len(IDS)
    for t in unmasked(batch):
        want[t.index] = 0.5 * slopes[kind](t.theta - t.ref)
    assert gradient.tolist() == pytest.approx(want, rel=1e-9)


def test_entropy_bonus_has_a_gradient(algo: Make) -> None:
    batch = loss_batch()
    entropy = batch.entropy.clone().requires_grad_()
    output = compose_loss(algo(entropy_coef=0.3), dataclasses.replace(batch, entropy=entropy), ppo_clip, none)
    (gradient,) = torch.autograd.grad(output.loss.sum(), entropy)
    torch.testing.assert_close(gradient, -0.3 * MASK.double())


def test_custom_functions_may_return_nan_on_masked_tokens(algo: Make) -> None:
    def bad_loss(config: Config, batch: LossBatch) -> LossOutput:
        loss = torch.where(batch.mask > 0, -batch.log_probs, torch.nan)
        return LossOutput(loss=loss, metrics={"mine": loss.detach()})

    def bad_weights(config: Config, batch: LossBatch) -> OffPolicyOutput:
        return OffPolicyOutput(weights=torch.where(batch.mask > 0, 2.0, torch.nan).double(), mask=batch.mask)

    batch = loss_batch()
    log_probs = batch.log_probs.clone().requires_grad_()
    output = compose_loss(algo(), dataclasses.replace(batch, log_probs=log_probs), bad_loss, bad_weights)
    (gradient,) = torch.autograd.grad(output.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -2 * MASK.double())
    assert torch.isfinite(output.loss).all() and torch.isfinite(output.metrics["mine"]).all()


def test_bad_use_is_named(algo: Make) -> None:
    with pytest.raises(ValueError, match="--use-kl-loss needs ref_log_probs"):
        compose_loss(algo(use_kl_loss=True), loss_batch(ref_log_probs=None), ppo_clip, none)


def test_supervised_training_has_no_engine_metrics(algo: Make) -> None:
    output = compose_loss(algo(), loss_batch(), POLICY_LOSSES.load("sft"), None)
    assert sorted(output.metrics) == ["entropy", "loss", "nll", "pg_loss"]


def take(batch: LossBatch, samples: list[int]) -> tuple[LossBatch, torch.Tensor]:
    """A micro-batch of some samples in that order, and the flat positions of its tokens."""
    positions = torch.tensor([t for s in samples for t, i in enumerate(IDS) if i == s])
    local = torch.tensor([k for k, s in enumerate(samples) for i in IDS if i == s])
    fields = {k: v[positions] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(batch, **{**fields, "sample_ids": local}, num_samples=len(samples)), positions


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.builtins))
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(algo: Make, mode: str, name: str) -> None:
    config = algo(loss_aggregation=mode, policy_loss=name, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
    batch, function = loss_batch(), POLICY_LOSSES.load(name)
    ids = {"sample_ids": torch.tensor(IDS), "rollout_ids": torch.tensor(ROLLOUTS), "group_ids": torch.tensor(GROUPS)}
    weights = token_weights(config, mask=MASK, **ids)

    def total(splits: list[list[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
        log_probs = batch.log_probs.clone().requires_grad_()
        loss, parts = torch.zeros((), dtype=torch.float64), {}
        for samples in splits:
            micro, positions = take(dataclasses.replace(batch, log_probs=log_probs), samples)
            output = compose_loss(config, micro, function, icepop)
            loss = loss + (output.loss * weights[positions]).sum()
            for key, value in token_metrics(output.metrics, weights[positions]).items():
                old = parts.get(key, 0.0)
                parts[key] = max(old, float(value)) if is_maximum(key) else old + float(value)
        return float(loss.detach()), torch.autograd.grad(loss, log_probs)[0], finish_metrics(parts)

    whole = total([list(range(len(MASKS)))])
    for splits in (
        [[i] for i in range(11)],
        [[10, 3, 6], [0, 5, 7, 1], [2, 9], [8, 4]],
        [[6], [5, 4, 3, 2, 1, 0, 10, 9, 8, 7]],
    ):
        loss, gradient, metrics = total(splits)
        assert loss == pytest.approx(whole[0], rel=1e-12)
        torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-14)
        assert metrics == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


def plain(batch: LossBatch) -> torch.Tensor:
    return -batch.advantages * batch.log_probs


def in_place(config: Config, batch: LossBatch) -> LossOutput:
    output = LossOutput(loss=plain(batch))
    for numbers in (batch.mask, batch.advantages, batch.log_probs):
        numbers.mul_(0)
    return output


def in_place_correction(config: Config, batch: LossBatch) -> OffPolicyOutput:
    output = OffPolicyOutput(weights=torch.ones_like(batch.mask), mask=batch.mask.clone())
    for numbers in (batch.mask, batch.advantages, batch.old_log_probs):
        numbers.mul_(0)
    return output


def test_code_of_ones_own_may_change_the_batch_it_gets(algo: Make) -> None:
    config = algo(policy_loss="own:loss", off_policy_correction="own:correction")
    expected = compose_loss(config, loss_batch(), lambda config, batch: LossOutput(loss=plain(batch)), none)
    got = compose_loss(config, loss_batch(), in_place, in_place_correction)
    assert torch.equal(got.loss, expected.loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: None, r"--policy-loss own:loss: must return a LossOutput, got NoneType"),
        (plain, "must return a LossOutput, got Tensor"),
        (lambda b: LossOutput(loss=1.0), r"loss must be one real number per token, \(\d+,\), got float"),
        (lambda b: LossOutput(loss=plain(b)[:, None]), r"loss must be one real number .* got \(\d+, 1\)"),
        (lambda b: LossOutput(loss=plain(b).to(torch.complex64)), "loss must be one real number .*complex64"),
        (lambda b: LossOutput(loss=plain(b).detach()), "the loss has no gradient, so nothing would be trained"),
        (lambda b: LossOutput(loss=plain(b), metrics=[1.0]), "metrics must be a dict, got list"),
        (lambda b: LossOutput(loss=plain(b), metrics={"m": 0.5}), "m must be one real number per token, .* got float"),
        (lambda b: LossOutput(loss=plain(b), metrics={"loss": b.mask}), "a metric must not be called loss"),
        (lambda b: LossOutput(loss=plain(b), metrics={"weight_sum": b.mask}), "a metric must not be called weight_sum"),
    ],
)
def test_what_a_loss_of_ones_own_returns_is_checked(algo: Make, make: Callable[..., object], message: str) -> None:
    config = algo(policy_loss="own:loss")
    batch = loss_batch()
    batch.log_probs.requires_grad_()
    with pytest.raises(ValueError, match=message):
        compose_loss(config, batch, lambda config, batch: make(batch), none)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w, m: None, r"--off-policy-correction own:fix: must return a OffPolicyOutput, got NoneType"),
        (
            lambda w, m: OffPolicyOutput(weights=w[:, None], mask=m),
            r"weights must be one real number .* got \(\d+, 1\)",
        ),
        (lambda w, m: OffPolicyOutput(weights=w.sum(), mask=m), r"weights must be one real number per token"),
        (lambda w, m: OffPolicyOutput(weights=w, mask=m.sum()), r"mask must be one real number per token"),
        (lambda w, m: OffPolicyOutput(weights=w * torch.nan, mask=m), "weights must be finite on tokens"),
        (lambda w, m: OffPolicyOutput(weights=w, mask=m * torch.nan), "mask must be finite on tokens"),
    ],
)
def test_what_a_correction_of_ones_own_returns_is_checked(
    algo: Make, make: Callable[..., object], message: str
) -> None:
    config = algo(off_policy_correction="own:fix")
    with pytest.raises(ValueError, match=message):
        compose_loss(config, loss_batch(), ppo_clip, lambda config, b: make(torch.ones_like(b.mask), b.mask))  # type: ignore[arg-type]


def test_a_maximum_is_over_trained_tokens_that_were_not_rejected(algo: Make) -> None:
    batch, config = loss_batch(), algo(policy_loss="own:loss", off_policy_upper=1.3)

    def loss(config: Config, batch: LossBatch) -> LossOutput:
        return LossOutput(loss=plain(batch), metrics={"lowest_max": -1.0 - batch.mask})

    output = compose_loss(config, batch, loss, icepop)
    parts = token_metrics({"lowest_max": output.metrics["lowest_max"]}, batch.mask)
    assert finish_metrics({name: float(value) for name, value in parts.items()})["lowest_max"] == -2.0
    nothing = token_metrics({"lowest_max": output.metrics["lowest_max"]}, batch.mask * 0)
    assert finish_metrics({name: float(value) for name, value in nothing.items()})["lowest_max"] == 0.0
