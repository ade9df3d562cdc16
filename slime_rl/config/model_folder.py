"""Whether a Hugging Face folder is whole, seen from file names, sizes and safetensors headers alone: no torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tokenizer_config.json")
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
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder}: must hold weights as *.safetensors, found {_contents(folder)}")
        return files
    names = sorted(set(_weight_map(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {INDEX} names {len(names)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:4])}; found {_contents(folder)}"
        )
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """Weight -> file name, as the index has it."""
    try:
        return {name: str(Path(file)) for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / INDEX}: must map names to files under weight_map: {type(error).__name__}: {error}"
        ) from error


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
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file}: must be a safetensors file, its header cannot be read: {error}") from error
    expected = 8 + length + end
    if size != expected:
        what = "cut off" if size < expected else "too long"
        raise ValueError(f"{file}: is {what}: by its header it has {expected} bytes, found {size}")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    shown = ", ".join(names[:8]) or "nothing"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
