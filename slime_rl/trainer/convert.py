"""Hugging Face folder <-> torch_dist checkpoint, without weights in any model and one tensor at a time.

    config.json ──► Megatron model on the meta device ──► names and boxes of its torch_dist checkpoint ──► Parameters
    safetensors ──► rule.shard ──► boxes in *.distcp                                   (convert_part.py, per worker)
    *.distcp    ──► rule.merge ──► safetensors with an index                           (convert_part.py, per worker)

A torch_dist checkpoint does not depend on a parallel layout: what is written here loads with any tensor, pipeline and
expert-parallel size, and what any of them saved is read. Memory is that of the largest parameter, two or three times.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from slime_rl.config import Config, parse_config
from slime_rl.config.model_folder import INDEX
from slime_rl.data.folder_aside import folder_aside, replace_folder
from slime_rl.trainer.convert_part import OutputFile, Parameter, Slot, run_workers, write_hf_files, write_torch_dist
from slime_rl.trainer.device import prepare_process, resolve_device
from slime_rl.trainer.hf_export import copy_companions
from slime_rl.trainer.hf_folder import HFFolder, TensorInfo, write_safetensors
from slime_rl.trainer.torch_dist import TorchDistReader, write_index

if TYPE_CHECKING:
    from slime_rl.trainer.conversion import FamilyConversion

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def conversion_config(
    hf_path: Path, model_conversion_path: str, trust_remote_code: bool, model_provider_path: str | None = None
) -> Config:
    """A Config that names a model; the rest of it is not used. No rows are read: any file that exists will do."""
    argv = ["--hf-checkpoint", str(hf_path), "--model-conversion-path", model_conversion_path, "--device", "cpu"]
    argv += ["--train-dtype", "bfloat16"]  # of weights that are stored as fp8
    argv += ["--prompt-data", os.devnull, *(["--trust-remote-code"] if trust_remote_code else [])]
    argv += [] if model_provider_path is None else ["--model-provider-path", model_provider_path]
    return parse_config(argv)


@contextmanager
def open_conversion(config: Config) -> Iterator[FamilyConversion]:
    """The weight conversion of a model, in a process group of this process alone.

    Raises:
        ValueError: an unknown architecture or field, or a plugin whose weights are not described by rules.
    """
    prepare_process(resolve_device("cpu"), 0, 0, 1)
    from slime_rl.trainer import distributed, plugins
    from slime_rl.trainer.conversion import FamilyConversion

    kind = plugins.load_conversion(config.model.model_conversion_path)
    if not issubclass(kind, FamilyConversion):
        raise ValueError(
            "--model-conversion-path must name a subclass of slime_rl.trainer.conversion.FamilyConversion to convert "
            f"checkpoints without a run, got {config.model.model_conversion_path!r}"
        )
    with tempfile.TemporaryDirectory() as folder:
        distributed.initialize_alone(resolve_device("cpu"), Path(folder) / "store")
        try:
            yield plugins.open_conversion(config, config.model.hf_checkpoint)
        finally:
            distributed.shutdown()


def list_parameters(config: Config, conversion: FamilyConversion) -> list[Parameter]:
    """Every parameter of the model and where a torch_dist checkpoint keeps it; tied copies are left out."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from slime_rl.trainer.checkpoint import LAYOUT
    from slime_rl.trainer.plugins import build_stage

    with torch.device("meta"):
        model = build_stage(config, conversion.architecture, True, True, None)
    found: dict[Any, Parameter] = {}
    seen: set[str] = set()
    for name, entry in model.sharded_state_dict(metadata=LAYOUT).items():
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
            continue  # Transformer Engine's extra state
        place = conversion.place_of(name, model)
        rule = conversion.rules[place.key]
        if seen.issuperset(place.names(rule)):
            continue
        seen.update(place.names(rule))
        boxes = [entry] if isinstance(entry, ShardedTensor) else _built(entry.build())
        slots = sorted((_slot(box) for box in boxes), key=lambda slot: slot.first_row)
        found[place] = Parameter(place, rule, tuple(cast(torch.Tensor, entry.data).shape), tuple(slots))
    return [found[place] for place in sorted(found)]


def _built(content: Any) -> list[Any]:
    """The sharded tensors in what a factory built: a list, a dict, or one."""
    if isinstance(content, dict):
        return [box for value in content.values() for box in _built(value)]
    if isinstance(content, list | tuple):
        return [box for value in content for box in _built(value)]
    return [content]


def _slot(box: Any) -> Slot:
    data = box.data
    row = data[0].numel() if data.dim() > 0 and len(data) else 1
    return Slot(
        key=box.key,
        whole=tuple(box.global_shape),
        offsets=tuple(box.global_offset),
        shape=tuple(data.shape),
        first_row=data.storage_offset() // max(1, row),
    )


def hf_to_torch_dist(config: Config, folder: Path, num_workers: int) -> int:
    """Write the weights of --hf-checkpoint into `folder`/model, its other files to `folder`/hf; returns parameters.

    Raises:
        ValueError: a weight is missing, has no place in the model, does not fit config.json or is quantised.
    """
    source = Path(config.model.hf_checkpoint)
    with open_conversion(config) as conversion:
        parameters = list_parameters(config, conversion)
        weights = HFFolder(source, torch.bfloat16)
        conversion.check_coverage({name for p in parameters for name in p.names}, weights)
        kept = list(conversion.kept_weights(str(source)))
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "hf").mkdir()
    shares = _shares(parameters, [p.num_values for p in parameters], num_workers)
    written = run_workers(write_torch_dist, shares, source, folder / "model", _key_types(parameters, weights))
    write_index(folder / "model", (box for part in written for box in part), {"step": 0, "extra": {}})
    copy_companions(source, folder / "hf", None)
    if kept:
        infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in kept]
        write_safetensors(folder / "hf" / "kept.safetensors", infos, [tensor for _, tensor in kept])
    return sum(p.num_values for p in parameters)


def _key_types(parameters: list[Parameter], weights: HFFolder) -> dict[str, torch.dtype]:
    """The type of each torch_dist key: it has one, which must hold every weight that is kept under it."""
    found: dict[str, torch.dtype] = {}
    for parameter in parameters:
        for dtype in map(weights.dtype_of, parameter.names):
            for slot in parameter.slots:
                found[slot.key] = torch.promote_types(found.get(slot.key, dtype), dtype)
    return found


def torch_dist_to_hf(
    config: Config, model_dir: Path, output: Path, *, num_workers: int, dtype: str | None, shard_bytes: int
) -> int:
    """Write the Hugging Face folder `output`, whole or not at all; config and tokenizer are those of --hf-checkpoint.

    Raises:
        ValueError: the checkpoint is not whole, or of another model than --hf-checkpoint.
    """
    origin = Path(config.model.hf_checkpoint)
    reader = TorchDistReader(model_dir)
    with open_conversion(config) as conversion:
        parameters = list_parameters(config, conversion)
        kept = _kept_infos(conversion, origin)
    files = plan_files(parameters, reader, kept, DTYPES[dtype] if dtype else None, shard_bytes)
    with folder_aside(output) as aside:
        shares = _shares(files, [sum(i.num_bytes for i in f.infos) for f in files], num_workers)
        run_workers(write_hf_files, shares, model_dir, origin, aside)
        copy_companions(origin, aside, dtype)
        if len(files) > 1:
            sizes = sum(info.num_bytes for file in files for info in file.infos)
            names = {info.name: file.name for file in files for info in file.infos}
            (aside / INDEX).write_text(json.dumps({"metadata": {"total_size": sizes}, "weight_map": names}, indent=2))
        replace_folder(aside, output)
    return sum(p.num_values for p in parameters)


def _kept_infos(conversion: FamilyConversion, origin: Path) -> list[TensorInfo]:
    if not any(origin.glob("*.safetensors")):
        return []
    return [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in conversion.kept_weights(str(origin))]


def plan_files(
    parameters: list[Parameter],
    reader: TorchDistReader,
    kept: list[TensorInfo],
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> list[OutputFile]:
    """Which tensor goes into which file: in the model's order, each file at most `shard_bytes` unless one is larger."""
    groups: list[tuple[list[Parameter], list[TensorInfo], list[str]]] = [([], [], [])]
    size = 0
    items: list[tuple[Parameter | None, list[TensorInfo]]] = [(p, _infos(p, reader, dtype)) for p in parameters]
    items += [(None, [TensorInfo(i.name, dtype or i.dtype, i.shape)]) for i in kept]
    for parameter, infos in items:
        num_bytes = sum(info.num_bytes for info in infos)
        if size and size + num_bytes > shard_bytes:
            groups.append(([], [], []))
            size = 0
        size += num_bytes
        groups[-1][1].extend(infos)
        if parameter is not None:
            groups[-1][0].append(parameter)
        else:
            groups[-1][2].append(infos[0].name)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return [OutputFile(name, tuple(p), tuple(i), tuple(c)) for name, (p, i, c) in zip(names, groups, strict=True)]


def _infos(parameter: Parameter, reader: TorchDistReader, dtype: torch.dtype | None) -> list[TensorInfo]:
    stored = dtype or reader.dtype(parameter.slots[0].key)
    blank = parameter.rule.merge([torch.empty(parameter.shape, device="meta")])
    return [TensorInfo(n, stored, tuple(t.shape)) for n, t in zip(parameter.names, blank, strict=True)]


def _shares(items: list[Any], sizes: list[int], count: int) -> list[list[Any]]:
    """The items over at most `count` workers, the largest first to whoever has least."""
    shares: list[list[Any]] = [[] for _ in range(max(1, min(count, len(items))))]
    loads = [0] * len(shares)
    for _, index in sorted(((size, i) for i, size in enumerate(sizes)), key=lambda pair: (-pair[0], pair[1])):
        least = loads.index(min(loads))
        shares[least].append(items[index])
        loads[least] += sizes[index]
    return shares
