"""Every family over two workers, bit by bit: Hugging Face -> Megatron -> Hugging Face, and through torch_dist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.hf_parity import same_weights
from benchmarks.tiny_models import CATALOGUE, IS_MOE, SHAPE, make_named
from benchmarks.trainer_cases import Job, make_batch, make_config, run_jobs
from slime_rl.cluster.checkpoint import find_model_folder
from slime_rl.trainer.hf_folder import HFFolder
from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf

SPLITS = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "ep2": ("--expert-model-parallel-size", "2"),
}
CASES = [(n, s) for n, (kind, _) in CATALOGUE.items() for s in SPLITS if s != "ep2" or kind in IS_MOE]
# Saved by two workers with the optimizer and read without any: one family of each kind of layout.
SAVED = [
    ("Llama 3 (scaled rotary)", "tp2"),
    ("Qwen3-MoE (some layers dense)", "ep2"),
    ("DeepSeek-V3 with MTP layer", "pp2"),
]


def flags(name: str, split: str) -> list[str]:
    needs_sequence_parallel = split == "tp2" and CATALOGUE[name][0] in IS_MOE
    return [*SPLITS[split], *(["--sequence-parallel"] if needs_sequence_parallel else [])]


def place(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{list(CATALOGUE).index(name)}-{kind}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every family two models, the first as torch_dist, and what two workers made of them."""
    path = tmp_path_factory.mktemp("conversion")
    for name in CATALOGUE:
        make_named(place(path, name, "hf"), name)
        make_named(place(path, name, "other"), name, seed=1)
        arguments = ["--hf-checkpoint", str(place(path, name, "hf")), "--save", str(place(path, name, "dist"))]
        assert convert_hf_to_torch_dist.main(arguments) == 0
    jobs = [make_job(path, name, split) for name, split in CASES]
    run_jobs(jobs + [make_trained_job(path, name, split) for name, split in SAVED], 2)
    return path


def make_job(path: Path, name: str, split: str) -> Job:
    return Job(
        make_config(place(path, name, "other"), *flags(name, split), workers=2),
        batches=[],
        save_hf_first=place(path, name, f"{split}-other"),
        load_weights=find_model_folder(place(path, name, "dist"))[0],
        save_hf=place(path, name, split),
    )


def make_trained_job(path: Path, name: str, split: str) -> Job:
    return Job(
        make_config(place(path, name, "hf"), *flags(name, split), workers=2),
        batches=[make_batch()],
        save=place(path, name, f"{split}-saved"),
        save_hf=place(path, name, f"{split}-trained"),
    )


@pytest.mark.parametrize(("name", "split"), CASES)
def test_weights_come_back_bitwise_from_two_workers(name: str, split: str, folder: Path) -> None:
    assert same_weights(place(folder, name, "other"), place(folder, name, f"{split}-other"))


@pytest.mark.parametrize(("name", "split"), CASES)
def test_converted_checkpoint_loads_on_two_workers_bitwise(name: str, split: str, folder: Path) -> None:
    """The weights of the first model are in the second one's workers: only the torch_dist checkpoint has them."""
    ours, theirs = HFFolder(place(folder, name, split)), HFFolder(place(folder, name, "hf"))
    untrained = f".layers.{SHAPE['num_hidden_layers']}."  # those of the run's own folder
    trained = [name for name in ours.names if untrained not in name]
    assert len(trained) > 10
    assert all(torch.equal(ours.tensor(n), theirs.tensor(n)) for n in trained)


@pytest.mark.parametrize(("name", "split"), SAVED)
def test_what_two_workers_saved_is_read_without_any(name: str, split: str, folder: Path, tmp_path: Path) -> None:
    saved, origin = place(folder, name, f"{split}-saved"), place(folder, name, "hf")
    arguments = ["--input-dir", str(saved), "--output-dir", str(tmp_path / "out"), "--origin-hf-dir", str(origin)]
    assert convert_torch_dist_to_hf.main(arguments) == 0
    assert same_weights(place(folder, name, f"{split}-trained"), tmp_path / "out")
    assert not same_weights(origin, tmp_path / "out")
