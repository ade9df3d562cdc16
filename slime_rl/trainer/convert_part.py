"""What one worker of a conversion does. Needs no Megatron and no process group: each writes files of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_rl.trainer.families.rules import Place, Rule, Stacked, check_shapes
from slime_rl.trainer.hf_folder import HFFolder, TensorInfo, write_safetensors
from slime_rl.trainer.torch_dist import TorchDistFile, TorchDistReader, Written


@dataclass(frozen=True)
class Slot:
    """Where a run of rows of a whole parameter lies in a torch_dist checkpoint."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the rows
    first_row: int


@dataclass(frozen=True)
class Parameter:
    """A whole Megatron parameter: its rule, its Hugging Face names, its slots in row order."""

    place: Place
    rule: Rule
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def names(self) -> list[str]:
        return self.place.names(self.rule)

    @property
    def num_values(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file to write: the tensors of some parameters, then tensors copied from another folder."""

    name: str
    parameters: tuple[Parameter, ...]
    infos: tuple[TensorInfo, ...]
    copied: tuple[str, ...] = ()


def write_torch_dist(
    hf_path: Path, folder: Path, dtypes: Mapping[str, torch.dtype], rank: int, parameters: list[Parameter]
) -> list[Written]:
    """Write the data file of worker `rank`: these parameters, each slot key in its type of `dtypes`."""
    torch.serialization.set_crc32_options(False)  # the store has checksums of whole files
    source = HFFolder(hf_path, torch.bfloat16)
    with TorchDistFile(folder, rank) as file:
        for parameter in parameters:
            for slot, rows in _rows(parameter, source, hf_path):
                file.write(slot.key, slot.whole, slot.offsets, rows.to(dtypes[slot.key]))
        return file.boxes


def _rows(parameter: Parameter, source: HFFolder, hf_path: Path) -> Iterator[tuple[Slot, Tensor]]:
    sources = [source.source(name) for name in parameter.names]
    try:
        check_shapes(parameter.rule, parameter.names, sources, parameter.shape, 1)
    except ValueError as error:
        raise ValueError(f"{hf_path}: {error}") from error
    if isinstance(parameter.rule, Stacked) and len(parameter.slots) == len(sources):
        pieces = [one[:] for one in sources]  # stored apart as well: nothing to put together first
    else:
        whole = parameter.rule.shard(sources, 0, 1)
        pieces = [whole[s.first_row : s.first_row + s.shape[0]] for s in parameter.slots]
    for slot, piece in zip(parameter.slots, pieces, strict=True):
        yield slot, piece.clone() if piece.numel() < piece.untyped_storage().nbytes() // piece.itemsize else piece


def read_parameter(reader: TorchDistReader, parameter: Parameter) -> list[Tensor]:
    """The Hugging Face tensors of a parameter, from a torch_dist checkpoint of any parallel layout."""
    parts = []
    for slot in parameter.slots:
        stored = reader.shape(slot.key)
        rows_may_be_padded = len(slot.whole) == 2 and stored[0] >= slot.whole[0] and stored[1:] == slot.whole[1:]
        if stored != slot.whole and not (rows_may_be_padded and slot.offsets[0] == 0):
            raise ValueError(
                f"{reader.folder}: {slot.key} must have shape {slot.whole} by config.json, got {stored}; it is a "
                "checkpoint of another model"
            )
        sizes = (1,) * (len(slot.whole) - len(slot.shape)) + slot.shape
        parts.append(reader.read(slot.key, (slot.offsets, sizes)).reshape(slot.shape))
    if isinstance(parameter.rule, Stacked) and len(parts) == len(parameter.names):
        return parts  # stored apart, as they are needed
    return parameter.rule.merge([torch.cat(parts) if len(parts) > 1 else parts[0]])


def write_hf_files(model_dir: Path, copied_from: Path, folder: Path, rank: int, files: list[OutputFile]) -> None:
    """Write these safetensors files; `rank` is only there to tell workers apart."""
    reader = TorchDistReader(model_dir)
    for file in files:
        write_safetensors(folder / file.name, list(file.infos), _tensors(reader, copied_from, file))
    reader.close()


def _tensors(reader: TorchDistReader, copied_from: Path, file: OutputFile) -> Iterator[Tensor]:
    types = iter(file.infos)
    wanted = {info.name for info in file.infos}
    for parameter in file.parameters:
        for name, tensor in zip(parameter.names, read_parameter(reader, parameter), strict=True):
            if name in wanted:
                yield _as_type(name, tensor, next(types).dtype)
    if file.copied:
        source = HFFolder(copied_from)
        for name in file.copied:
            yield _as_type(name, source.tensor(name), next(types).dtype)


def _as_type(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another type.

    Raises:
        ValueError: a value is too large for it.
    """
    changed = tensor.to(dtype)
    if dtype == torch.float16 != tensor.dtype and bool((changed.isinf() & ~tensor.isinf()).any()):
        raise ValueError(f"--dtype float16: {name} has values up to {tensor.abs().max():g}, and float16 ends at 65504")
    return changed


def run_workers(function: Callable[..., Any], shares: list[Any], *arguments: Any) -> list[Any]:
    """`function(*arguments, rank, share)` for every share, each in a process of its own where there are several.

    Raises:
        ValueError: what a worker raised, or that one was killed.
    """
    if len(shares) == 1:
        return [function(*arguments, 0, shares[0])]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(function, *arguments, rank, share) for rank, share in enumerate(shares)]
        try:
            return [call.result() for call in calls]
        except BrokenProcessPool as error:
            raise ValueError(
                f"one of {len(shares)} worker processes was killed, maybe for lack of memory; try fewer --num-workers"
            ) from error
