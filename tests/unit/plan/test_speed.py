"""Times against formulas done by hand and a loop whose steady state is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config

from slime_rl.plan.__main__ import planned_config
from slime_rl.plan.hardware import ACCELERATORS
from slime_rl.plan.memory import engine_plan
from slime_rl.plan.shape import read_shape
from slime_rl.plan.speed import (
    DECODE_EFFICIENCY,
    Lengths,
    Rates,
    decode_round_s,
    estimate_rates,
    estimate_step,
    forward_passes,
    num_micro_batches,
    pipeline_idle_share,
    simulate,
    train_flops_per_token,
)

LENGTHS = Lengths(prompt=20, response=80, longest=200)


def test_pipeline_idle_share_of_the_paper() -> None:
    assert pipeline_idle_share(4, 8) == 3 / 11
    assert pipeline_idle_share(4, 8, parts=2) == 3 / 19
    assert pipeline_idle_share(1, 8) == 0


def test_operations_of_one_token_by_hand(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    shape = read_shape(config.model.hf_checkpoint)
    assert train_flops_per_token(shape, config, LENGTHS) == 3 * (2 * 18_592 + 2 * 2 * 32 * 100)


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ([], 3),
        (["--recompute-activations"], 4),
        (["--num-updates-per-rollout", "2"], 4),
        (["--num-updates-per-rollout", "2", "--old-log-probs", "rollout"], 3),
        (["--old-log-probs", "recompute", "--use-kl-loss", "--kl-loss-coef", "0.1"], 5),
        (["--num-epochs-per-rollout", "2"], 7),
    ],
)
def test_forward_passes(tmp_path: Path, flags: list[str], passes: int) -> None:
    assert forward_passes(make_config(tmp_path, *flags)) == passes


def test_micro_batches_hold_whole_samples(tmp_path: Path) -> None:
    flags = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-tokens-per-worker", "350"]
    assert num_micro_batches(make_config(tmp_path, *flags), LENGTHS) == 6  # 16 samples, 3 in each
    assert num_micro_batches(make_config(tmp_path, *flags, "--train-num-workers", "2"), LENGTHS) == 3
    assert num_micro_batches(make_config(tmp_path, *flags, "--micro-batch-size", "8"), LENGTHS) == 2


def test_decoding_one_request_reads_the_weights_once() -> None:
    config = planned_config("qwen3-8b", ["--train-dtype", "bfloat16"])
    shape, gpu = read_shape(config.model.hf_checkpoint), ACCELERATORS["h100-80g"]
    engine = engine_plan(shape, config, gpu.memory_bytes)
    seconds = decode_round_s(shape, engine, gpu, 1, 1000)
    assert seconds == pytest.approx((2 * 8_190_735_360 + 1000 * 147_456) / 3.35e12 / DECODE_EFFICIENCY)
    many = decode_round_s(shape, engine, gpu, 4096, 10)  # so many that arithmetic limits
    assert many == pytest.approx(2 * shape.active_parameters * 4096 / 989e12 / DECODE_EFFICIENCY)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_all_gpus_of_an_engine_compute_in_any_dtype(dtype: str, size: int) -> None:
    config = planned_config("qwen3-8b", ["--train-dtype", dtype, "--rollout-num-gpus-per-engine", "8"])
    shape, gpu = read_shape(config.model.hf_checkpoint), ACCELERATORS["h100-80g"]
    engine = engine_plan(shape, config, gpu.memory_bytes)
    assert engine.weight_bytes == size * 8_190_735_360 / 8
    many = decode_round_s(shape, engine, gpu, 65536, 1)
    assert many == pytest.approx(2 * shape.active_parameters * 65536 / (8 * 989e12) / DECODE_EFFICIENCY)


def test_prompts_take_their_time_once_for_all_samples() -> None:
    flags = ["--train-dtype", "bfloat16", "--n-samples-per-prompt", "4", "--rollout-batch-size", "8"]
    config = planned_config("qwen3-8b", flags)
    shape, gpu = read_shape(config.model.hf_checkpoint), ACCELERATORS["h100-80g"]
    engine = engine_plan(shape, config, gpu.memory_bytes)
    rates = estimate_rates(shape, config, engine, gpu, Lengths(prompt=2000, response=1, longest=1), crosses_nodes=False)
    reading = 8 * 2000 * 2 * shape.active_parameters / (989e12 * DECODE_EFFICIENCY)
    decoding = decode_round_s(shape, engine, gpu, 32, 2000.5)
    assert 32 / rates.rollout_tokens_s == pytest.approx(reading + decoding)


@pytest.mark.parametrize(
    ("rollout", "train", "sync", "ahead", "step_s", "staleness"),
    [
        (10, 5, 1, 0, 16, 0),
        (5, 10, 1, 0, 16, 0),
        (5, 10, 1, 1, 11, 1),  # the trainer is the slower one: engines wait
        (10, 5, 1, 1, 11, 1),  # the engines are: they stand still only while weights come
        (10, 10, 0, 1, 10, 1),
        (5, 10, 1, 3, 11, 3),
    ],
)
def test_steady_state(rollout: float, train: float, sync: float, ahead: int, step_s: float, staleness: float) -> None:
    step = simulate(rollout, train, sync, ahead)
    assert step.step_s == pytest.approx(step_s)
    assert step.staleness == staleness
    assert step.trainer_idle == pytest.approx(1 - train / step_s)
    assert step.engines_idle == pytest.approx(1 - rollout / step_s)


@pytest.mark.parametrize(
    ("work", "train", "sync", "span", "bound", "step_s"),
    [
        (10, 5, 1, 10, 1, 11),  # without a tail: as many steps ahead
        (1, 5, 0, 29, 1, 17),  # a tail must fit into K + 1 steps: (29 + 5) / 2
        (1, 5, 0, 29, 4, 6.8),
        (1, 5, 0, 29, 8, 5),  # then the trainer limits
        (10, 5, 1, 60, 9, 11),  # or the engines
    ],
)
def test_production_without_pause_hides_the_longest_responses(
    work: float, train: float, sync: float, span: float, bound: int, step_s: float
) -> None:
    step = simulate(work, train, sync, bound, span)
    assert step.step_s == pytest.approx(step_s, rel=0.02)
    assert step.staleness <= bound


def test_the_mode_of_generation_is_the_one_of_the_flags(tmp_path: Path) -> None:
    rates = Rates(rollout_tokens_s=1e4, request_tokens_s=5, train_tokens_s=1e4, sync_s=0, source="test")
    modes = [[], ["--rollout-ahead", "1"], ["--fully-async", "--max-staleness", "4"]]
    modes.append(["--fully-async", "--max-staleness", "0"])
    synchronous, ahead, continuous, bound_0 = [
        estimate_step(make_config(tmp_path, *mode), rates, LENGTHS).step_s for mode in modes
    ]
    assert continuous < ahead < synchronous == bound_0


def test_a_rollout_is_never_faster_than_its_longest_response(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
    rates = Rates(rollout_tokens_s=1e9, request_tokens_s=50, train_tokens_s=100, sync_s=0, source="test")
    step = estimate_step(config, rates, LENGTHS)
    assert step.rollout_s == 200 / 50
    assert step.train_s == 4 * 100 / 100
