"""An update that is written to disk gives the same numbers when it is computed again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.trainer_cases import free_ports, make_batch, make_checkpoint, make_config
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.ragged import Ragged
from slime_rl.trainer.replay import find_updates, read_config, replay_update
from slime_rl.trainer.worker import TrainWorker

ROOT = Path(__file__).resolve().parents[3]
TERMS = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--num-updates-per-rollout", "2", "--num-epochs-per-rollout", "2")


def worker_of(config: object) -> TrainWorker:
    return TrainWorker(config, 0, 1, "127.0.0.1", free_ports(1)[0])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run of two steps, the second one dumped."""
    folder = tmp_path_factory.mktemp("run")
    make_checkpoint(folder / "model", num_hidden_layers=2)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    flags = ["--advantage-estimator", "gae", "--dump-train-steps", "1", "--run-dir", str(folder)]
    config = make_config(folder / "model", *TERMS, *flags, "--prompt-data", str(folder / "prompts.jsonl"))
    worker = worker_of(config)
    try:
        for step in range(2):
            metrics = worker.train(step, make_batch(step, updates=2))
    finally:
        worker.shutdown()
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": {metrics["train/loss"]!r}}}\n')
    return folder


def test_every_update_of_the_step_is_replayed_exactly(run_dir: Path) -> None:
    folders = find_updates(run_dir, 1)
    assert [f.name for f in folders] == [
        f"{role}_epoch{epoch}_update{update}" for role in ("critic", "policy") for epoch in (0, 1) for update in (0, 1)
    ]
    worker = worker_of(read_config(folders[0]))
    try:
        for folder in folders:
            replay = replay_update(worker, folder)
            assert replay.metrics == replay.record["metrics"]
            assert replay.micro_batch_losses == [part["loss"] for part in replay.record["micro_batches"]]
            assert replay.problem is None
    finally:
        worker.shutdown()


def test_tool_shows_that_the_logged_loss_comes_out_again(run_dir: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(run_dir), "1"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "updates=8 exact=8" in outcome.stdout
    assert "train/loss" in outcome.stdout


def test_tool_notices_other_weights(run_dir: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(find_updates(run_dir, 1)[-1], tmp_path / "update")
    file = tmp_path / "update" / "rank_00000" / "tensors.safetensors"
    tensors = load_file(file)
    tensors["weights/0/decoder.final_layernorm.weight"] *= 1.01
    save_file(tensors, file)
    command = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(tmp_path / "update")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 1 and "updates=1 exact=0" in outcome.stdout


def test_loss_that_is_not_finite_is_dumped_and_found_again(run_dir: Path, tmp_path: Path) -> None:
    from slime_rl.trainer.loss import NonFiniteError

    batch = make_batch(step=4)
    log_probs = batch.ragged("rollout_log_probs")
    values = log_probs.values.clone()
    values[int(log_probs.offsets[5])] = torch.nan
    masks = torch.ones_like(batch.ragged("loss_mask").values)
    changes = {
        "rollout_log_probs": Ragged(values, log_probs.offsets),
        "loss_mask": Ragged(masks, log_probs.offsets),
    }
    bad = RolloutBatch({**batch.tensors, **changes}, None, batch.meta_info)
    prompts = ["--prompt-data", str(run_dir / "prompts.jsonl")]
    config = make_config(run_dir / "model", "--old-log-probs", "rollout", "--run-dir", str(tmp_path), *prompts)
    worker = worker_of(config)
    try:
        with pytest.raises(NonFiniteError, match=r"samples \[5\].*tools/replay_step\.py") as error:
            worker.train(4, bad)
        (folder,) = find_updates(tmp_path, None)
        assert str(folder) in str(error.value)
        replay = replay_update(worker, folder)
        assert replay.problem == replay.record["problem"] and "samples [5]" in replay.problem
    finally:
        worker.shutdown()
    assert not list(folder.rglob("*.pt")) and not list(folder.rglob("*.pkl"))


def test_folder_without_a_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no dump of a training update of step 3"):
        find_updates(tmp_path, 3)
