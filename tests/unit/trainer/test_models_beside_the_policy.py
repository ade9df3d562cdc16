"""Reference that follows, teacher, adaptive KL and frozen parameters in one real worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, open_worker


def test_reference_follows_the_policy_and_is_in_the_checkpoint(model_path: Path, tmp_path: Path) -> None:
    flags = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--lr", "1e-2"]
    batch = make_batch()
    with open_worker(make_config(model_path, *flags)) as worker:
        first = worker.compute_log_probs(batch, "reference")
        worker.train(0, make_batch(0))
        assert torch.equal(worker.compute_log_probs(batch, "reference"), first)
        worker.train(1, make_batch(1))
        second = worker.compute_log_probs(batch, "reference")
        assert torch.equal(second, worker.compute_log_probs(batch)) and not torch.equal(second, first)
        worker.train(2, make_batch(2))
        worker.save(tmp_path / "saved", 3, {})
    with open_worker(make_config(model_path, *flags)) as worker:
        worker.load(tmp_path / "saved")
        assert torch.equal(worker.compute_log_probs(batch, "reference"), second)
        assert not torch.equal(worker.compute_log_probs(batch), second)


def test_distillation_moves_the_policy_to_the_teacher(model_path: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "teacher", num_hidden_layers=2, seed=9)
    flags = ["--policy-loss", "distillation", "--teacher-load", str(tmp_path / "teacher"), "--lr", "3e-3"]
    batch = make_batch()
    mask = batch.ragged("loss_mask").values > 0
    with open_worker(make_config(tmp_path / "teacher")) as worker:
        teacher = worker.compute_log_probs(batch)
    with open_worker(make_config(model_path, *flags, "--old-log-probs", "recompute")) as worker:
        gap = (worker.compute_log_probs(batch) - teacher)[mask]
        metrics = worker.train(0, batch)
        assert metrics["train/teacher_kl"] == pytest.approx(float(gap.mean()), rel=1e-4)
        # Tokens that the teacher likes better gain, the others lose.
        moved = (worker.compute_log_probs(batch)[mask] - (gap + teacher[mask])) * -gap
        assert float(moved.mean()) > 0


@pytest.mark.parametrize(
    ("flags", "change", "named"),
    [
        ("--policy-loss distillation --teacher-load", {"tie_word_embeddings": True}, "its tie_word_embeddings is True"),
        ("--policy-loss distillation --teacher-load", {"rms_norm_eps": 0.5}, "its rms_norm_eps is 0.5"),
        ("--use-kl-loss --ref-load", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "rope_theta"),
        ("--use-kl-loss --ref-load", {"vocab_size": 7}, "its vocab_size is 7"),
    ],
)
def test_a_model_of_another_architecture_is_refused(
    model_path: Path, tmp_path: Path, flags: str, change: dict[str, Any], named: str
) -> None:
    """It is computed in the policy's modules, which would give other numbers than its own."""
    other = shutil.copytree(model_path, tmp_path / "other")
    content = json.loads((other / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(content))
    flag = flags.split()[-1]
    with (
        pytest.raises(ValueError, match=f"{flag} must have the architecture of --hf-checkpoint.*{named}"),
        open_worker(make_config(model_path, *flags.split(), str(other))),
    ):
        pass


def test_kl_coefficient_follows_its_target_and_is_in_the_checkpoint(model_path: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "reference", num_hidden_layers=2, seed=5)
    flags = [
        "--kl-coef",
        "0.1",
        "--kl-target",
        "1e-4",
        "--kl-horizon",
        "120",
        "--ref-load",
        str(tmp_path / "reference"),
    ]
    flags += ["--kl-reward-type", "k2"]  # never negative, and far above the target
    with open_worker(make_config(model_path, *flags)) as worker:
        assert worker.train(0, make_batch(0))["train/kl_coef"] == 0.1
        metrics = worker.train(1, make_batch(1))
        assert metrics["train/kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 12 / 120))
        assert metrics["train/kl_reward"] > 1e-3
        worker.save(tmp_path / "saved", 2, {"cursor": 1})
        third = worker.train(2, make_batch(2))
    with open_worker(make_config(model_path, *flags)) as worker:
        worker.load(tmp_path / "saved")
        resumed = worker.train(2, make_batch(2))
    assert resumed["train/kl_coef"] == third["train/kl_coef"] > metrics["train/kl_coef"]
    assert resumed["train/loss"] == third["train/loss"]


def test_frozen_parameters_stay_and_the_others_move(model_path: Path) -> None:
    patterns = ["embedding", r"decoder\.layers\.0\.", "layernorm"]
    with open_worker(make_config(model_path, "--freeze-params", *patterns, "--lr", "1e-2")) as worker:
        before = {name: tensor.clone() for name, tensor in worker.export_weights()}
        worker.train(0, make_batch())
        moved = {name for name, tensor in worker.export_weights() if not torch.equal(before[name], tensor)}
    assert "lm_head.weight" in moved and "model.layers.1.mlp.down_proj.weight" in moved
    assert not any("embed" in name or "layers.0." in name or "layernorm" in name for name in moved)


def test_pattern_that_freezes_nothing_or_everything_is_refused(model_path: Path) -> None:
    for pattern, message in (("no_such_layer", "no parameter of the model"), (".", "nothing is left to train")):
        with pytest.raises(ValueError, match=message), open_worker(make_config(model_path, "--freeze-params", pattern)):
            pass
