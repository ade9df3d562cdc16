"""Hugging Face -> Megatron on two workers -> Hugging Face, bit by bit, for a family of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.hf_parity import same_weights
from benchmarks.tiny_models import CATALOGUE, IS_MOE, make_named
from benchmarks.trainer_cases import Job, make_config, run_jobs

TP = ("--tensor-model-parallel-size", "2")
SPLITS = {
    "tp2": TP,
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "ep2": ("--expert-model-parallel-size", "2"),
}


def cases() -> list[tuple[str, str]]:
    return [(n, s) for n, (kind, _) in CATALOGUE.items() for s in SPLITS if s != "ep2" or kind in IS_MOE]


def flags(name: str, split: str) -> list[str]:
    needs_sequence_parallel = split == "tp2" and CATALOGUE[name][0] in IS_MOE
    return [*SPLITS[split], *(["--sequence-parallel"] if needs_sequence_parallel else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family's model under its number, and what each split of it exported."""
    path = tmp_path_factory.mktemp("conversion")
    numbers = {name: str(i) for i, name in enumerate(CATALOGUE)}
    for name, number in numbers.items():
        make_named(path / number, name)
    jobs = [
        Job(make_config(path / numbers[n], *flags(n, s), workers=2), [], save_hf=path / f"{numbers[n]}-{s}")
        for n, s in cases()
    ]
    run_jobs(jobs, 2)
    return path


@pytest.mark.parametrize(("name", "split"), cases())
def test_weights_come_back_bitwise_from_two_workers(name: str, split: str, folder: Path) -> None:
    number = list(CATALOGUE).index(name)
    assert same_weights(folder / str(number), folder / f"{number}-{split}")
