"""An update that is written to disk gives the same numbers when it is computed again."""

from __future__ import annotations

import json
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.trainer_cases import Job, free_ports, make_batch, make_checkpoint, make_config, open_worker, run_jobs
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.ragged import Ragged
from slime_rl.trainer.replay import find_updates, make_worker, read_config, replay_update
from tools.replay_step import equal, next_answer, run_workers

ROOT = Path(__file__).resolve().parents[3]
TERMS = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--num-updates-per-rollout", "2", "--num-epochs-per-rollout", "2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run of two steps, the second one dumped; its critic is smaller than its policy."""
    folder = tmp_path_factory.mktemp("run")
    make_checkpoint(folder / "model", num_hidden_layers=2)
    make_checkpoint(folder / "critic", "llama", num_hidden_layers=1, hidden_size=40)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    flags = ["--advantage-estimator", "gae", "--critic-load", str(folder / "critic")]
    flags += ["--dump-train-steps", "1", "--run-dir", str(folder)]
    config = make_config(folder / "model", *TERMS, *flags, "--prompt-data", str(folder / "prompts.jsonl"))
    with open_worker(config) as worker:
        for step in range(2):
            metrics = worker.train(step, make_batch(step, updates=2))
    lines = ['{"step": 1, "eval/a/accuracy": 0.5}', f'{{"step": 1, "train/loss": {metrics["train/loss"]!r}}}', '{"st']
    (folder / "metrics.jsonl").write_text("\n".join(lines))  # an evaluation before the step, and a kill after it
    return folder


def test_every_update_of_the_step_is_replayed_exactly(run_dir: Path) -> None:
    folders = find_updates(run_dir, 1)
    assert [f.name for f in folders] == [
        f"{role}_epoch{epoch}_update{update}" for role in ("critic", "policy") for epoch in (0, 1) for update in (0, 1)
    ]
    for of_one_model in (folders[:4], folders[4:]):
        worker = make_worker(of_one_model[0], 0, free_ports(1)[0])
        try:
            for replay in [replay_update(worker, folder) for folder in of_one_model]:
                assert replay.metrics == replay.record["metrics"]
                assert replay.micro_batch_losses == [part["loss"] for part in replay.record["micro_batches"]]
                assert replay.problem is None
        finally:
            worker.shutdown()


def test_router_biases_in_a_dump_are_those_before_the_update(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    flags = ["--megatron-moe-router-bias-update-rate", "0.01", "--dump-train-steps", "0", "--run-dir", str(tmp_path)]
    name = "0/decoder.layers.1.mlp.router.expert_bias"
    with open_worker(make_config(tmp_path / "model", *flags)) as worker:
        from slime_rl.trainer.dump import named_weights

        biases = [dict(named_weights(worker.state.models))[name].clone()]
        worker.train(0, make_batch(0))
        biases.append(dict(named_weights(worker.state.models))[name].clone())
    assert (biases[1] - biases[0]).abs() == pytest.approx(torch.full((4,), 0.01), rel=1e-4)  # it has moved
    (folder,) = find_updates(tmp_path, 0)
    dumped = load_file(folder / "rank_00000/tensors.safetensors")[f"weights/{name}"]
    assert torch.equal(dumped, biases[0])
    worker = make_worker(folder, 0, free_ports(1)[0])
    try:
        replay = replay_update(worker, folder)
        assert replay.metrics == replay.record["metrics"]
    finally:
        worker.shutdown()


def test_tool_shows_that_the_logged_loss_comes_out_again(run_dir: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(run_dir), "1"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "updates=8 exact=8" in outcome.stdout
    logged = re.search(r"step 1: train/loss (\S+) -> (\S+)", outcome.stdout)
    assert logged is not None and float(logged[1]) == pytest.approx(float(logged[2]), rel=1e-6)


def test_a_worker_that_dies_is_told_at_once() -> None:
    dead = SimpleNamespace(exitcode=-9)
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        next_answer([SimpleNamespace(exitcode=None), dead], queue.Queue())


def test_tool_notices_other_weights(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(find_updates(run_dir, 1)[-1], tmp_path / "update")
    file = tmp_path / "update" / "rank_00000" / "tensors.safetensors"
    tensors = load_file(file)
    tensors["weights/0/decoder.final_layernorm.weight"] *= 1.01
    save_file(tensors, file)
    command = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(tmp_path / "update")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 1 and "updates=1 exact=0" in outcome.stdout


def with_nan(batch: RolloutBatch, sample: int) -> RolloutBatch:
    """The same with a NaN among the engine's log-probs of a sample, and every token trained on."""
    log_probs = batch.ragged("rollout_log_probs")
    values = log_probs.values.clone()
    values[int(log_probs.offsets[sample])] = torch.nan
    masks = torch.ones_like(batch.ragged("loss_mask").values)
    changes = {
        "rollout_log_probs": Ragged(values, log_probs.offsets),
        "loss_mask": Ragged(masks, log_probs.offsets),
    }
    return RolloutBatch({**batch.tensors, **changes}, None, batch.meta_info)


def test_loss_that_is_not_finite_is_dumped_and_found_again(run_dir: Path, tmp_path: Path) -> None:
    from slime_rl.trainer.loss import NonFiniteError

    prompts = ["--prompt-data", str(run_dir / "prompts.jsonl")]
    config = make_config(run_dir / "model", "--old-log-probs", "rollout", "--run-dir", str(tmp_path), *prompts)
    with open_worker(config) as worker:
        with pytest.raises(NonFiniteError, match=r"samples \[5\].*tools/replay_step\.py") as error:
            worker.train(4, with_nan(make_batch(step=4), 5))
        (folder,) = find_updates(tmp_path, None)
        assert str(folder) in str(error.value)
        replay = replay_update(worker, folder)
        assert replay.problem == replay.record["problem"] and "samples [5]" in replay.problem
    assert not list(folder.rglob("*.pt")) and not list(folder.rglob("*.pkl"))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel says no as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_bytes", [10, 2_000, 20_000])
def test_a_full_disk_is_named_and_leaves_no_half_of_a_dump(run_dir: Path, tmp_path: Path, num_bytes: int) -> None:
    from slime_rl.trainer.loss import NonFiniteError

    prompts = ["--prompt-data", str(run_dir / "prompts.jsonl"), "--dump-train-steps", "0", "3"]
    config = make_config(run_dir / "model", "--old-log-probs", "rollout", "--run-dir", str(tmp_path), *prompts)
    where = r"worker 0 could not write its part of the dump .*_update0 \(--dump-train-steps\): .*File too large"
    with open_worker(config) as worker:
        with files_of_at_most(num_bytes):
            with pytest.raises(OSError, match=where):
                worker.train(0, make_batch(step=0))
            with pytest.raises(NonFiniteError, match=rf"samples \[5\].*nothing was updated, and {where}"):
                worker.train(1, with_nan(make_batch(step=1), 5))
        assert [path for path in (tmp_path / "train_dumps").rglob("*") if path.is_file() or "rank" in path.name] == []
        for _ in range(2):  # again, as a run that was resumed
            worker.train(3, make_batch(step=3))
        (folder,) = find_updates(tmp_path, None)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank_00000"]
        assert replay_update(worker, folder).problem is None


@pytest.mark.parametrize("split", [[], ["--tensor-model-parallel-size", "2"]], ids=["dp2", "tp2"])
def test_two_workers_dump_and_two_others_replay(run_dir: Path, tmp_path: Path, split: list[str]) -> None:
    flags = ["--old-log-probs", "rollout", "--dump-train-steps", "0", "--run-dir", str(tmp_path)]
    prompts = ["--prompt-data", str(run_dir / "prompts.jsonl")]
    config = make_config(run_dir / "model", *flags, *prompts, *split, workers=2)
    with pytest.raises(RuntimeError, match=r"NonFiniteError: step 1, .*, samples \[5\] \(sample numbers"):
        run_jobs([Job(config, [make_batch(0), with_nan(make_batch(1), 5)])], 2)
    good, bad = run_workers(find_updates(tmp_path, 0) + find_updates(tmp_path, 1))
    assert good.metrics == good.record["metrics"] and good.problem is None
    assert good.micro_batch_losses == [part["loss"] for part in good.record["micro_batches"]]
    assert all(equal(logged, bad.metrics[name]) for name, logged in bad.record["metrics"].items())
    assert bad.problem == bad.record["problem"] and "samples [5]" in bad.problem
    trained = {sample for part in good.record["micro_batches"] for sample in part["samples"]}
    assert trained == set(range(12))


def test_folder_without_a_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no dump of a training update of step 3 .*--dump-train-steps\)$"):
        find_updates(tmp_path, 3)


def test_a_step_without_a_dump_is_answered_with_those_that_have_one(run_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"of step 7 .*; of the steps 1 there are some"):
        find_updates(run_dir, 7)


def with_record(**changes: Any) -> Callable[[Path], None]:
    def change(update: Path) -> None:
        file = update / "rank_00000" / "update.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def without_a_flag(update: Path) -> None:
    content = json.loads((update / "config.json").read_text())
    del content["algorithm"]["sapo_tau_pos"]
    (update / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_record(format=2), r"update\.json: must be a dump of format 1, got 2"),
        (with_record(role="judge"), r"update\.json: role must be one of policy, critic, got 'judge'"),
        (with_record(rows="all"), r"update\.json: rows must be of type list, got 'all'"),
        (with_record(rows=[0, 99]), r"update\.json: rows must be 0\.\.11, .* got 99"),
        (lambda u: (u / "rank_00000/update.json").write_text("[1]"), r"update\.json: must be a dump .* got 'list'"),
        (lambda u: (u / "rank_00000/update.json").write_text('{"role": "pol'), r"update\.json: cannot be read"),
        (lambda u: (u / "rank_00000/tensors.safetensors").write_bytes(b"cut"), r"tensors\.safetensors: cannot be read"),
        (lambda u: (u / "rank_00000/tensors.safetensors").unlink(), r"tensors\.safetensors: cannot be read"),
        (lambda u: (u / "config.json").unlink(), r"config\.json: cannot be read"),
        (without_a_flag, r"config\.json: another version of slime_rl wrote it: algorithm\.sapo_tau_pos is missing"),
    ],
)
def test_a_damaged_dump_is_named(run_dir: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    update = shutil.copytree(find_updates(run_dir, 1)[-1], tmp_path / "update")
    damage(update)
    with pytest.raises(ValueError, match=message):
        read_config(find_updates(tmp_path, None)[0])
        with open_worker(make_config(run_dir / "model")) as worker:
            replay_update(worker, update)
