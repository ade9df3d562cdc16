"""Computing a dumped update again, on the same number of workers: the same batch, inputs and weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slime_rl.config import Config, recorded_config
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.storage import load_batch
from slime_rl.data.tensor_file import load_tensors

FORMAT = 1  # of the dumps that dump.py writes
ROLES = ("policy", "critic")
RECORD = {
    **{"role": str, "step": int, "epoch": int, "update": int, "rows": list, "world_size": int, "weights_rank": int},
    **{"micro_batches": list, "metrics": dict},
}


@dataclass(frozen=True)
class Replay:
    """What was logged for an update, and what came out now; micro-batches of this worker alone."""

    record: dict[str, Any]
    metrics: dict[str, float]
    micro_batch_losses: list[float]
    problem: str | None


def find_updates(path: Path, step: int | None) -> list[Path]:
    """The dumped updates of a run folder, a step's folder or one update's folder, in the order they were made.

    Raises:
        ValueError: nothing is there, or several steps are and `step` does not say which.
    """
    found = sorted(file.parent.parent for file in path.rglob("rank_00000/update.json"))
    steps = sorted({_read(folder, 0)["step"] for folder in found})
    if not found or step not in (None, *steps):
        which = "" if step is None else f" of step {step}"
        there = f"; of the steps {', '.join(map(str, steps))} there are some" if steps else ""
        raise ValueError(
            f"{path} holds no dump of a training update{which} (RUN_DIR/train_dumps, --dump-train-steps){there}"
        )
    if step is None and len(steps) > 1:
        raise ValueError(f"{path} holds dumps of the steps {', '.join(map(str, steps))}; say which")
    found = [folder for folder in found if step in (None, _read(folder, 0)["step"])]
    return sorted(found, key=lambda folder: [_read(folder, 0)[key] for key in ("role", "epoch", "update")])


def world_size(folder: Path) -> int:
    """Workers that the dumped update ran on."""
    return int(_read(folder, 0)["world_size"])


def read_config(folder: Path) -> Config:
    """The Config of the run that made the dump."""
    path = folder / "config.json"
    try:
        return recorded_config(_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def role(folder: Path) -> str:
    """Whose update was dumped: "policy" or "critic"."""
    return _read(folder, 0)["role"]


def make_worker(folder: Path, rank: int, port: int) -> Any:
    """Worker `rank` of those that the dumped update ran on, all on this machine. Collective."""
    import torch

    from slime_rl.trainer.critic_worker import CriticWorker
    from slime_rl.trainer.worker import TrainWorker

    kind = TrainWorker if role(folder) == "policy" else CriticWorker
    local = rank % max(1, torch.cuda.device_count())
    return kind(read_config(folder), rank, world_size(folder), "127.0.0.1", port, local)


def replay_update(worker: Any, folder: Path) -> Replay:
    """Compute the update's loss and gradient with the worker of `make_worker`. Collective.

    Raises:
        ValueError: the dump does not fit the worker's model.
    """
    from slime_rl.trainer.dump import restore_weights
    from slime_rl.trainer.loss import CriticInputs, PolicyInputs, find_problem
    from slime_rl.trainer.member import CRITIC_FOLDER
    from slime_rl.trainer.shard import make_shard
    from slime_rl.trainer.update import forward_backward, measure

    record = _read(folder, worker.rank)
    state = worker.states["" if record["role"] == "policy" else CRITIC_FOLDER]
    own = folder / f"rank_{worker.rank:05d}"
    tensors = _tensors(own / "tensors.safetensors")
    holder = _tensors(folder / f"rank_{record['weights_rank']:05d}" / "tensors.safetensors")
    restore_weights(state.models, _part(holder, "weights/"))
    batch = load_batch(own / "batch", RolloutBatch)
    _check_rows(own / "update.json", record["rows"], batch)
    shard = make_shard(state, batch)
    given: dict[str, Any] = {name: value.to(state.device) for name, value in _part(tensors, "inputs/").items()}
    if record["role"] == "policy":
        absent: dict[str, Any] = dict.fromkeys(field.name for field in fields(PolicyInputs))
        objective = PolicyInputs(**(absent | given | {"version": record["version"]}))
    else:
        objective = CriticInputs(**given)
    loss_fn = objective.loss_fn(state.config, record["epoch"] == 0 and record["update"] == 0)
    results, _ = forward_backward(state, shard, record["rows"], loss_fn)
    metrics = measure(state, results)
    problem = find_problem(results, metrics["grad_norm"], shard.sample_ids, state.layout.dp.rank, state.device)
    return Replay(record, metrics, [float(r.loss) for r in results], problem)


def _check_rows(path: Path, rows: list[Any], batch: RolloutBatch) -> None:
    if outside := [row for row in rows if not isinstance(row, int) or not 0 <= row < len(batch)]:
        raise ValueError(
            f"{path}: rows must be 0..{len(batch) - 1}, the samples of the batch beside it, got {outside[0]}"
        )


def _part(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _read(folder: Path, rank: int) -> dict[str, Any]:
    """What is known of a worker's part of an update.

    Raises:
        ValueError: the file is missing, cut, or not of the form that `dump_update` writes; names it.
    """
    path = folder / f"rank_{rank:05d}" / "update.json"
    record = _json(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path}: must be a dump of format {FORMAT}, got {found!r}")
    for name, kind in RECORD.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{path}: {name} must be of type {kind.__name__}, got {record.get(name)!r}")
    if record["role"] not in ROLES:
        raise ValueError(f"{path}: role must be one of {', '.join(ROLES)}, got {record['role']!r}")
    return record


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _tensors(path: Path) -> dict[str, Any]:
    try:
        return load_tensors(path)
    except Exception as error:  # safetensors has an error of its own
        raise ValueError(f"{path}: cannot be read: {error}") from error
