"""Real gloo groups of two workers against one worker: the loss does not depend on how the work is split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.trainer_cases import (
    Job,
    Outcome,
    make_batch,
    make_checkpoint,
    make_config,
    relative_difference,
    run_jobs,
)
from slime_rl.trainer.torch_dist import TorchDistReader

LIMIT = 1e-5
STEPS = 5
# Policy, KL and entropy terms, and two updates per step, so that ratios and clipping are at work.
TERMS = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01", "--num-updates-per-rollout", "2"]
# With the default 1e-8 Adam turns gradients that are nothing but rounding into whole steps.
TERMS += ["--adam-eps", "1e-5"]
OVERLAPPED = ["--megatron-overlap-grad-reduce", "--megatron-overlap-param-gather"]
SPLITS = {
    "dp2": [],
    "tp2": ["--tensor-model-parallel-size", "2"],
    "tp2_sequence_parallel": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "pp2_interleaved": [
        "--pipeline-model-parallel-size",
        "2",
        "--megatron-virtual-pipeline-model-parallel-size",
        "2",
    ],
    "cp2": ["--context-parallel-size", "2"],
    "dp2_overlapped": OVERLAPPED,
    "dp2_many_buckets": [*OVERLAPPED, "--megatron-bucket-size", "1000"],  # with padding between, as in large models
}

PPO = ["--advantage-estimator", "gae", "--critic-lr", "1e-3", "--kl-coef", "0.05"]
PPO += ["--kl-target", "0.01", "--kl-horizon", "100"]  # so that the coefficient is another one in every step
PPO_SPLITS = ["dp2", "tp2_sequence_parallel", "pp2", "cp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer")
    make_checkpoint(path / "model")
    make_checkpoint(path / "reference", seed=1)
    make_checkpoint(path / "tied", tie_word_embeddings=True)
    return path


def make_job(folder: Path, *flags: str, workers: int = 1, steps: slice = slice(0, STEPS), **paths: Path) -> Job:
    batches = [make_batch(step, updates=2) for step in range(STEPS)]
    reference = ["--ref-load", str(folder / "reference")]
    return Job(make_config(folder / "model", *TERMS, *reference, *flags, workers=workers), batches[steps], **paths)


def frozen_job(folder: Path, *flags: str, workers: int = 1) -> Job:
    """Training of a model whose output layer is its embedding, which stays as it is."""
    flags = (*flags, "--freeze-params", "embedding", r"layers\.1\.", "--lr", "1e-3", "--adam-eps", "1e-5")
    return Job(make_config(folder / "tied", *flags, workers=workers), [make_batch(0), make_batch(1)])


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Outcome]:
    saved = folder / "checkpoint"
    jobs = {
        "whole": make_job(folder),
        "one_sample_each": make_job(folder, "--micro-batch-size", "1"),
        "first_four": make_job(folder, steps=slice(0, 4), save=saved),
        "resumed": make_job(folder, steps=slice(4, 5), load=saved),
        "ppo": make_job(folder, *PPO, steps=slice(0, 2)),
        "frozen": frozen_job(folder),
    }
    return dict(zip(jobs, run_jobs(list(jobs.values()), 1), strict=True))


@pytest.fixture(scope="module")
def double(folder: Path, single: dict[str, Outcome]) -> dict[str, Outcome]:
    saved = folder / "checkpoint"
    jobs = {name: make_job(folder, *flags, workers=2) for name, flags in SPLITS.items()}
    for name in PPO_SPLITS:
        jobs[f"ppo_{name}"] = make_job(folder, *PPO, *SPLITS[name], workers=2, steps=slice(0, 2))
    for name in ("dp2", "pp2"):
        jobs[f"frozen_{name}"] = frozen_job(folder, *SPLITS[name], workers=2)
    # One worker each for policy and critic; with --kl-coef their numbers go both ways.
    jobs["ppo_critic_apart"] = make_job(folder, *PPO, "--critic-num-workers", "1", steps=slice(0, 2))
    for name in ("dp2", "tp2", "pp2"):
        jobs[f"resumed_{name}"] = make_job(folder, *SPLITS[name], workers=2, steps=slice(4, 5), load=saved)
    buckets = SPLITS["dp2_many_buckets"]
    jobs["buckets"] = make_job(folder, *buckets, workers=2, steps=slice(0, 4), save=folder / "buckets")
    jobs["resumed_buckets"] = make_job(folder, *buckets, workers=2, steps=slice(4, 5), load=folder / "buckets")
    return dict(zip(jobs, run_jobs(list(jobs.values()), 2), strict=True))


def test_terms_of_the_loss_are_all_there(single: dict[str, Outcome]) -> None:
    last = single["whole"].metrics[-1]
    parts = last["train/pg_loss"] + 0.1 * last["train/kl_loss"] - 0.01 * last["train/entropy"]
    assert last["train/loss"] == pytest.approx(parts, rel=1e-6)
    assert last["train/kl_loss"] > 0.01


def test_micro_batch_size_does_not_change_training(single: dict[str, Outcome]) -> None:
    assert relative_difference(single["one_sample_each"], single["whole"]) < LIMIT


@pytest.mark.parametrize("split", list(SPLITS))
def test_two_workers_train_as_one_does(split: str, single: dict[str, Outcome], double: dict[str, Outcome]) -> None:
    assert relative_difference(double[split], single["whole"]) < LIMIT


@pytest.mark.parametrize("split", [*PPO_SPLITS, "critic_apart"])
def test_two_workers_train_the_critic_as_one_does(
    split: str, single: dict[str, Outcome], double: dict[str, Outcome]
) -> None:
    assert single["ppo"].metrics[1]["critic/grad_norm"] > 0 != single["ppo"].metrics[1]["train/kl_reward"]
    assert relative_difference(double[f"ppo_{split}"], single["ppo"]) < LIMIT


@pytest.mark.parametrize("split", ["dp2", "pp2"])
def test_frozen_parameters_stay_on_every_worker(
    split: str, folder: Path, single: dict[str, Outcome], double: dict[str, Outcome]
) -> None:
    assert relative_difference(double[f"frozen_{split}"], single["frozen"]) < LIMIT
    weights = double[f"frozen_{split}"].weights
    for name, tensor in load_file(folder / "tied" / "model.safetensors").items():
        assert torch.equal(weights[name], tensor) == ("embed" in name or "layers.1." in name), name


def test_resumed_run_continues_exactly(single: dict[str, Outcome]) -> None:
    resumed, whole = single["resumed"], single["whole"]
    assert resumed.loaded == {"step": 4, "extra": {"cursor": 17}}
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/entropy"):
        assert resumed.metrics[0][name] == whole.metrics[4][name]
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())


def test_optimizer_state_is_saved_whole_where_gradients_are_reduced_in_many_buckets(
    folder: Path, single: dict[str, Outcome], double: dict[str, Outcome]
) -> None:
    saved = TorchDistReader(folder / "buckets")
    masters = {key: key.removeprefix("optimizer.state.param.") for key in saved.keys if ".state.param." in key}
    assert len(masters) > 30
    assert all(torch.equal(saved.read(key), saved.read(name)) for key, name in masters.items())
    resumed, whole = double["resumed_buckets"], single["whole"]
    assert resumed.metrics[0]["train/loss"] == pytest.approx(whole.metrics[4]["train/loss"], rel=LIMIT)
    assert all(torch.allclose(resumed.weights[name], tensor, atol=1e-5) for name, tensor in whole.weights.items())


@pytest.mark.parametrize("split", ["dp2", "tp2", "pp2"])
def test_checkpoint_loads_on_another_layout(split: str, single: dict[str, Outcome], double: dict[str, Outcome]) -> None:
    resumed = double[f"resumed_{split}"]
    whole = Outcome(metrics=single["whole"].metrics[4:], weights=single["whole"].weights)
    assert relative_difference(resumed, whole) < LIMIT
