"""Whether a Hugging Face folder is whole, seen from file names, sizes and safetensors headers alone: no torch."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tokenizer_config.json")
_SHARD = re.compile(r"(?P<prefix>.*)-\d+-of-(?P<count>\d+)\.safetensors$")
_MAX_HEADER_BYTES = 100 * 1024**2  # the format's own limit


def check_model_files(flag: str, folder: str | Path, needs_tokenizer: bool = True) -> None:
    """Check that tokenizer and weights are there, every shard named in the index too, and none is cut off.

    Raises:
        ValueError: with the flag, the folder, the rule and what is there.
    """
    folder = Path(folder)
    if needs_tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{flag} {folder}: must hold a tokenizer (one of {', '.join(TOKENIZER_FILES)}), found {_contents(folder)}"
        )
    try:
        weight_places(folder)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error


def weight_places(folder: Path) -> dict[str, Path]:
    """Name of every weight -> the file that holds it.

    Raises:
        ValueError: a file that is missing or not whole, a weight in two of them, or not where the index says.
    """
    places: dict[str, Path] = {}
    for file in weight_files(folder):
        for name in read_header(file):
            if name in places:
                raise ValueError(f"{folder}: {name} is in {places[name].name} and in {file.name}; one must be removed")
            places[name] = file
    index = _weight_map(folder) if (folder / INDEX).is_file() else {}
    for name, file in index.items():
        if places.get(name) != folder / file:
            raise ValueError(f"{folder / INDEX}: says that {name} is in {file}, which has no weight of that name")
    return places


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model's weights, by the index where there is one.

    Raises:
        ValueError: there is none, or the index is broken or names one that is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if not files:
            raise ValueError(f"{folder}: must hold weights as *.safetensors, found {_contents(folder)}{_hint(folder)}")
        _check_all_shards(folder, files)
        return files
    names = sorted(set(_weight_map(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {INDEX} names {len(names)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:4])}; found {_contents(folder)}"
        )
    return [folder / name for name in names]


def _hint(folder: Path) -> str:
    """What to do with a folder that has weights in another form."""
    if any(path.suffix in (".bin", ".pt", ".pth") for path in _listed(folder)):
        return "; transformers loads those, and its save_pretrained writes safetensors"
    if any(path.suffix == ".gguf" for path in _listed(folder)):
        return "; tools/convert_gguf_to_hf.py makes them from GGUF"
    return ""


def _check_all_shards(folder: Path, files: list[Path]) -> None:
    """Without an index the names say how many files there are."""
    of = {found["prefix"]: int(found["count"]) for path in files if (found := _SHARD.match(path.name))}
    for prefix, count in of.items():
        there = [path.name for path in files if (found := _SHARD.match(path.name)) and found["prefix"] == prefix]
        if len(there) != count:
            raise ValueError(f"{folder}: must hold all {count} files that {there[0]} is one of, found {len(there)}")


def _weight_map(folder: Path) -> dict[str, str]:
    """Weight -> file name, as the index has it."""
    try:
        content = json.loads((folder / INDEX).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX}: must be JSON: {error}") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{folder / INDEX}: must map names of weights to names of files under weight_map")
    return {name: str(Path(file)) for name, file in places.items()}


def read_header(file: Path) -> dict[str, Any]:
    """Name -> dtype, shape, data_offsets of a safetensors file.

    Raises:
        ValueError: it is not one, or its size is not what its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file}: must be a whole safetensors file, but its {size} bytes do not hold a header")
        try:
            header = json.loads(opened.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file}: must be a safetensors file, its header cannot be read: {error}") from error
    expected = 8 + length + end
    if size != expected:
        what = "cut off" if size < expected else "too long"
        raise ValueError(f"{file}: is {what}: by its header it has {expected} bytes, found {size}")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _contents(folder: Path) -> str:
    names = [path.name for path in _listed(folder)]
    shown = ", ".join(names[:8]) or "nothing"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
