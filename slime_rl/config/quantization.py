"""How a folder's weights are stored, from `quantization_config` of config.json and the headers of its files: no torch.

One kind is known, DeepSeek-V3's and Qwen3's fp8 in blocks: a weight `NAME` is float8_e4m3fn `[o, i]`, beside it lies
`NAME_scale_inv` `[ceil(o/rows), ceil(i/columns)]`, and the value is their product, block by block.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from slime_rl.config.model_folder import read_header, weight_files

FIELD = "quantization_config"
SCALE = "_scale_inv"
# What SGLang fuses into one matrix, so that every part must begin at a block, and what its ranks share by columns.
_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_SPLIT_BY_COLUMNS = ("o_proj", "down_proj")
# Fields without effect on weights that are stored; `dequantize` is for transformers.
_KNOWN = ("quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "dequantize")
_IGNORED_LAYERS = (
    "ignored_layers",
    "modules_to_not_convert",
)  # two names; SGLang reads the first that is there


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks:
    """Weights as float8_e4m3fn with one float32 scale for each block of `rows` x `columns` values."""

    rows: int
    columns: int
    power_of_two: bool = False  # scale_fmt ue8m0: scales are powers of two
    ignored: tuple[str, ...] = ()  # modules whose weights are not quantised
    ignored_field: str = _IGNORED_LAYERS[1]

    def ignores(self, weight: str) -> bool:
        """Whether its module, or one around it, is listed. SGLang's rule: whole parts of the name, anywhere in it."""
        path = f".{weight.rpartition('.')[0]}."
        return any(f".{name.removeprefix('model.')}." in path for name in self.ignored)


def quantization_entry(folder: str | Path) -> Any:
    """The field as it is; None where there is none.

    Raises:
        ValueError: config.json does not hold a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content.get(FIELD)


def read_quantization(folder: str | Path) -> Fp8Blocks | None:
    """How the weights of a Hugging Face folder are stored; None: as plain numbers.

    Raises:
        ValueError: a kind that is not known here, or that a running SGLang takes no new weights of.
    """
    path, entry = Path(folder) / "config.json", quantization_entry(folder)
    if entry is None:
        return None

    def refuse(name: str, rule: str, value: Any) -> NoReturn:
        raise ValueError(f"{path}: {FIELD}{name} must be {rule}, got {value!r}")

    if not isinstance(entry, dict):
        refuse("", "an object", entry)
    method = entry.get("quant_method")
    if method != "fp8":
        refuse(".quant_method", "fp8, the one kind that is built (else convert the weights to bfloat16)", method)
    if entry.get("fmt", "e4m3") != "e4m3":
        refuse(".fmt", "e4m3", entry["fmt"])
    if entry.get("activation_scheme") != "dynamic":
        refuse(".activation_scheme", "dynamic, as SGLang has it with blocks", entry.get("activation_scheme"))
    size = entry.get("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        refuse(
            ".weight_block_size",
            "[rows, columns] (SGLang transposes weights that have one scale, and then takes no new ones)",
            size,
        )
    if entry.get("scale_fmt") not in (None, "float", "ue8m0"):
        refuse(".scale_fmt", "float or ue8m0", entry["scale_fmt"])
    for name, value in entry.items():
        if value is not None and name not in _KNOWN and name not in _IGNORED_LAYERS:
            raise ValueError(f"{path}: {FIELD}.{name} = {value!r} is not known; it may change what the weights mean")
    field = next((name for name in _IGNORED_LAYERS if entry.get(name)), _IGNORED_LAYERS[1])
    ignored = entry.get(field) or []
    if not (isinstance(ignored, list) and all(isinstance(name, str) for name in ignored)):
        refuse(f".{field}", "a list of names", ignored)
    return Fp8Blocks(
        rows=size[0],
        columns=size[1],
        power_of_two=entry.get("scale_fmt") == "ue8m0",
        ignored=tuple(ignored),
        ignored_field=field,
    )


def quantized_weights(folder: str | Path) -> dict[str, tuple[int, int]]:
    """Name -> shape of the weights that a folder holds as fp8. Empty without quantization_config.

    Raises:
        ValueError: config.json and files disagree, so that an engine would read something else than is written.
    """
    blocks = read_quantization(folder)
    if blocks is None:
        return {}
    headers: dict[str, Any] = {}
    for file in weight_files(Path(folder)):
        headers |= read_header(file)
    found = {name: tuple(h["shape"]) for name, h in headers.items() if name + SCALE in headers}
    path = Path(folder) / "config.json"
    if not found:
        raise ValueError(f"{path}: {FIELD} says fp8, but no weight has a {SCALE.removeprefix('_')} beside it")
    _check_stored(headers, found, blocks, path)
    kinds = {_kind(name) for name in found}
    for name in headers:
        if name.endswith(SCALE) or _kind(name) not in kinds or blocks.ignores(name) is not (name in found):
            continue
        is_quantized = name in found
        raise ValueError(
            f"{path}: {FIELD}.{blocks.ignored_field} must list what is not quantised: it "
            f"{'lists' if is_quantized else 'does not list'} {name}, which {'is' if is_quantized else 'is not'} fp8"
        )
    return found


def _kind(name: str) -> str:
    """The same for all layers and experts."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _check_stored(headers: dict[str, Any], found: dict[str, tuple[int, int]], blocks: Fp8Blocks, path: Path) -> None:
    for name, header in headers.items():
        if (header["dtype"] == "F8_E4M3") is not (name in found):
            raise ValueError(f"{path.parent}: {name} is {header['dtype']}; F8_E4M3 and {name}{SCALE} go together")
    for name, shape in found.items():
        scale = headers[name + SCALE]["shape"]
        if len(shape) != 2:
            raise ValueError(f"{path.parent}: {name} must have two dimensions to be fp8 in blocks, got {list(shape)}")
        wanted = [-(-n // size) for n, size in zip(shape, (blocks.rows, blocks.columns), strict=True)]
        if scale != wanted:
            raise ValueError(
                f"{path}: {FIELD}.weight_block_size {[blocks.rows, blocks.columns]} makes {wanted} scales of {name} "
                f"{list(shape)}, but {name}{SCALE} is {scale}"
            )


def check_engine_blocks(folder: str | Path, num_shards: int, *, on_cuda: bool) -> None:
    """Check that blocks fall together with what SGLang fuses and with the parts of an engine's `num_shards` ranks.

    Raises:
        ValueError: with the block size and the weight.
    """
    blocks = read_quantization(folder)
    if blocks is None:
        return
    content = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    size = [blocks.rows, blocks.columns]
    start = f"{folder}/config.json: {FIELD}.weight_block_size {size}"
    if on_cuda and blocks.rows != blocks.columns:
        raise ValueError(f"{start} must be square: SGLang's checksum of an engine's weights takes it so")
    for name, (rows, columns) in quantized_weights(folder).items():
        if on_cuda and columns % blocks.columns:
            raise ValueError(f"{start} must divide the {columns} columns of {name} for SGLang's checksum")
        what, part, block = _engine_part(name, rows, columns, content, num_shards, size)
        if part % block:
            raise ValueError(
                f"{start}: SGLang needs a multiple of {block} {what} of {name} on each of the {num_shards} ranks of an "
                f"engine (--rollout-num-gpus-per-engine), got {part}"
            )


def _engine_part(
    name: str, rows: int, columns: int, content: dict[str, Any], num_shards: int, size: list[int]
) -> tuple[str, int, int]:
    """(rows or columns, how many a rank has, what they must be a multiple of)."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    is_latent = content.get("kv_lora_rank") is not None  # its q_proj is not fused
    heads = content.get("num_key_value_heads") or content.get("num_attention_heads") or num_shards
    if module in _SPLIT_BY_COLUMNS and num_shards > 1:
        return "columns", columns // num_shards, size[1]
    if module in _FUSED and (num_shards > 1 or not (is_latent and module == "q_proj")):
        shards = min(num_shards, heads) if module in ("k_proj", "v_proj") else num_shards
        return "rows", rows // shards, size[0]
    return "rows", 0, size[0]
