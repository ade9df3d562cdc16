"""One optimizer update on disk, whole enough to be computed again, with no pickle in it.

    RUN_DIR/train_dumps/step_00000012/policy_epoch0_update1/
        config.json                   the run's configuration
        rank_00000/update.json        rows, losses of the micro-batches, metrics, and the problem if there was one
        rank_00000/tensors.safetensors   inputs per token, and weights before the update
        rank_00000/batch/             this worker's samples

Workers that hold the same weights write them once. `trainer/replay.py` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.storage import save_batch
from slime_rl.data.tensor_file import write_tensors
from slime_rl.trainer.loss import MicroBatchResult, Objective
from slime_rl.trainer.model import unwrap
from slime_rl.trainer.pending_save import raise_on_all
from slime_rl.trainer.replay import FORMAT
from slime_rl.trainer.state import TrainState

FOLDER = "train_dumps"


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """Which update of the run it is, and which of this worker's rows it trains on."""

    role: str  # "policy" or "critic"
    step: int
    epoch: int
    update: int
    rows: list[int]

    @property
    def is_first(self) -> bool:
        return self.epoch == 0 and self.update == 0

    @property
    def where(self) -> str:
        who = "" if self.role == "policy" else f"{self.role}, "
        return f"{who}step {self.step}, epoch {self.epoch}, update {self.update}"

    def folder(self, run_dir: Path) -> Path:
        return run_dir / FOLDER / f"step_{self.step:08d}" / f"{self.role}_epoch{self.epoch}_update{self.update}"


def is_due(config: Config, step: int) -> bool:
    """Whether --dump-train-steps asks for this step."""
    return step in config.logging.dump_train_steps


def dump_update(
    state: TrainState,
    config: Config,
    batch: RolloutBatch,
    inputs: Objective,
    record: UpdateRecord,
    results: list[MicroBatchResult],
    metrics: dict[str, float],
    problem: str | None,
) -> Path:
    """Write everything that this update's loss and gradient come from; the folder, complete on return. Collective.

    `config` is the run's: the critic's state has one of its own.

    Raises:
        OSError: a rank could not write its part (a full disk); the same on all of them, and no half of a dump is left.
    """
    folder = record.folder(config.run_dir)
    rank, owner = dist.get_rank(), weights_owner(state)
    own = folder / f"rank_{rank:05d}"
    aside = own.with_name(f"{own.name}.partial")
    tensors = {f"inputs/{name}": value for name, value in _input_tensors(inputs)}
    if owner == rank:
        tensors |= {f"weights/{name}": value for name, value in named_weights(state.models)}
    content = dataclasses.asdict(record) | {
        "format": FORMAT,
        "world_size": dist.get_world_size(),
        "weights_rank": owner,
        "version": getattr(inputs, "version", None),
        "micro_batches": [
            {
                "index": r.index,
                "samples": [int(batch.dense("sample_ids")[row]) for row in r.rows],
                "loss": as_json(float(r.loss)),
            }
            for r in results
        ],
        "metrics": {name: as_json(value) for name, value in metrics.items()},
        "problem": problem,
    }
    try:
        with _written_by_all(folder, aside):
            write_tensors(aside / "tensors.safetensors", tensors)
            save_batch(batch, aside / "batch")
            (aside / "update.json").write_text(json.dumps(content, indent=2) + "\n")
            if rank == 0:
                (aside / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        shutil.rmtree(own, ignore_errors=True)  # of a run that was resumed before this step
        if rank == 0:
            os.replace(aside / "config.json", folder / "config.json")
        os.replace(aside, own)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    return folder


@contextmanager
def _written_by_all(folder: Path, aside: Path) -> Iterator[None]:
    """An empty `aside` for this rank's part of `folder`. Collective, at the end."""
    error: Exception | None = None
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield
    except (OSError, ValueError) as problem:  # save_batch has ValueErrors
        error = problem
    raise_on_all(error, f"the dump {folder} (--dump-train-steps)")


def _input_tensors(inputs: Objective) -> Iterator[tuple[str, Tensor]]:
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def named_weights(models: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of this rank under a name that is the same in every run."""
    for i, model in enumerate(models):
        for name, value in unwrap(model).state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                yield f"{i}/{name}", value


def weights_owner(state: TrainState) -> int:
    """Global rank that writes the weights which this rank holds too: the first of its data-parallel group.

    With expert parallelism those workers hold different experts, and each writes its own.
    """
    if state.config.parallel.expert_model_parallel_size > 1:
        return dist.get_rank()
    return dist.get_global_rank(state.layout.dp_cp.group, 0)


def as_json(value: float) -> float | str:
    """JSON has no NaN: "nan", "inf" and "-inf" stand for what is not finite, and `float()` reads them."""
    return value if math.isfinite(value) else str(value)


@torch.no_grad()
def restore_weights(models: list[Any], tensors: dict[str, Tensor]) -> None:
    """Put the weights of a dump into the models.

    Raises:
        ValueError: the dump is of another model.
    """
    own = dict(named_weights(models))
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise ValueError(f"the dump is of another model or layout: {len(odd)} weights differ, such as {odd[0]}")
    for name, value in own.items():
        value.data.copy_(tensors[name])
