"""Writing a Hugging Face folder from a stream of full tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from slime_rl.config import Config
from slime_rl.config.quantization import FIELD
from slime_rl.data.folder_aside import folder_aside, replace_folder
from slime_rl.trainer.hf_folder import TensorInfo, write_safetensors

SHARD_BYTES = 4 * 1024**3
CHAT_TEMPLATES = "additional_chat_templates"  # transformers' name for their folder
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def save_hf(weights: Iterator[tuple[str, Tensor]], path: Path, config: Config, is_writer: bool) -> None:
    """Write `weights`, and config, tokenizer and chat template of --hf-checkpoint, to `path`.

    The folder appears complete or not at all: it is written aside and renamed; one of that name is replaced. Every rank
    must call, since the stream is collective; one writes.
    """
    if not is_writer:
        for _ in weights:
            pass
        dist.barrier()
        return
    with folder_aside(path) as aside:
        _write_weights(weights, aside)
        copy_companions(Path(config.model.hf_checkpoint), aside, config.model.train_dtype)
        replace_folder(aside, path)
    dist.barrier()


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pending.items()]
        write_safetensors(folder / f"part-{len(shards)}.safetensors", infos, pending.values())
        shards.append(list(pending))
        pending, pending_bytes = {}, 0

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    weight_map = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        os.replace(folder / f"part-{i}.safetensors", folder / final)
        weight_map |= dict.fromkeys(names, final)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def copy_companions(source: Path, folder: Path, dtype: str | None) -> None:
    """Everything of the checkpoint that is not weights; config.json gets the type that was written, if given, and no
    quantization_config, since no weights are written as fp8.

    Of folders only that of further chat templates: others hold the weights in other formats, or runs.
    """
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
    if (source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / CHAT_TEMPLATES, folder / CHAT_TEMPLATES)
    settings = json.loads((source / "config.json").read_text())
    if dtype is None and FIELD not in settings:
        return
    settings.pop(FIELD, None)
    if dtype is not None:
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
