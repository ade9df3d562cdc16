"""What one worker of a conversion does. Needs no Megatron and no process group: each writes files of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime_rl.data.read_ahead import read_ahead
from slime_rl.trainer.families.rules import Place, Rule, Stacked, check_shapes
from slime_rl.trainer.hf_folder import HFFolder, TensorInfo, write_safetensors
from slime_rl.trainer.torch_dist import TorchDistFile, TorchDistReader, Written

T = TypeVar("T")


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
    hf_path: Path, folder: Path, dtypes: Mapping[str, torch.dtype], rank: int, parameters: list[Parameter], stop: Event
) -> list[Written]:
    """Write the data file of worker `rank`: these parameters, each slot key in its type of `dtypes`."""
    source = HFFolder(hf_path, torch.bfloat16)
    with TorchDistFile(folder, rank) as file:
        for pieces in read_ahead(list(_rows(parameter, source, hf_path, dtypes)) for parameter in parameters):
            check_stop(stop)
            for slot, rows in pieces:
                file.write(slot.key, slot.whole, slot.offsets, rows)
        return file.boxes


def _rows(
    parameter: Parameter, source: HFFolder, hf_path: Path, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[Slot, Tensor]]:
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
        is_view = piece.numel() < piece.untyped_storage().nbytes() // piece.itemsize  # torch.save writes all of it
        yield slot, (piece.clone() if is_view else piece).to(dtypes[slot.key])


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


def write_hf_files(
    model_dir: Path, copied_from: Path, folder: Path, rank: int, files: list[OutputFile], stop: Event
) -> None:
    """Write these safetensors files; `rank` is only there to tell workers apart."""
    reader = TorchDistReader(model_dir)
    for file in files:
        write_safetensors(folder / file.name, list(file.infos), _tensors(reader, copied_from, file, stop))
    reader.close()


def _tensors(reader: TorchDistReader, copied_from: Path, file: OutputFile, stop: Event) -> Iterator[Tensor]:
    types = iter(file.infos)
    wanted = {info.name for info in file.infos}
    ahead = read_ahead(read_parameter(reader, parameter) for parameter in file.parameters)
    for parameter, tensors in zip(file.parameters, ahead, strict=True):
        check_stop(stop)
        for name, tensor in zip(parameter.names, tensors, strict=True):
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


class Stopped(Exception):
    """Another worker has failed, or the conversion was interrupted: what is not yet written is not needed."""


def check_stop(stop: Event) -> None:
    if stop.is_set():
        raise Stopped


def run_workers(function: Callable[..., T], shares: list[Any], *arguments: Any) -> list[T]:
    """`function(*arguments, rank, share, stop)` for every share, each in a thread.

    When one raises, or the caller is interrupted, `stop` is set, so that the others end at their next tensor and not
    with the last one; what the first that failed raised is raised.
    """
    stop = Event()
    with _for_copying(), ThreadPoolExecutor(len(shares), "convert") as pool:
        running = [pool.submit(function, *arguments, rank, share, stop) for rank, share in enumerate(shares)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    failures = [error for one in running if (error := one.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, Stopped)):
        raise error
    return [one.result() for one in running]


@contextmanager
def _for_copying() -> Iterator[None]:
    """Torch as it copies fastest: no threads for one small matrix, no checksums (the store has some of whole files)."""
    threads, sums = torch.get_num_threads(), torch.serialization.get_crc32_options()
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.serialization.set_crc32_options(sums)
