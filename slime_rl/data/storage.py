"""A DataProto on disk: tensors in safetensors, everything else in JSON; no pickle, and never half a file.

FOLDER/batch.safetensors   dense tensors as NAME, ragged ones as NAME/values and NAME/offsets
FOLDER/batch.json          kinds of the fields, object arrays, meta info
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from torch import Tensor

from slime_rl.data.codec import decode, encode
from slime_rl.data.proto import DataProto, object_array
from slime_rl.data.ragged import Ragged
from slime_rl.data.tensor_file import load_tensors, problem_of, write_tensors

FORMAT = 1
_FILES = ("batch.json", "batch.safetensors")
P = TypeVar("P", bound=DataProto)


def save_batch(batch: DataProto, folder: str | Path) -> None:
    """Write `batch` to `folder`, which appears whole or not at all; a batch that is there is replaced.

    Raises:
        ValueError: something else is there, or there is no room; what cannot be written, or would not come back as it
            is (names the field, and the row of an object). Nothing is left of it.
    """
    folder = Path(folder)
    _check_fields(batch, folder)
    _check_place(folder)
    aside, before = folder.with_name(f"{folder.name}.partial"), folder.with_name(f"{folder.name}.before")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write(batch, aside)
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        aside.rename(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, ValueError | OSError):
            raise ValueError(f"{folder}: cannot be written: {error}") from error
        raise
    shutil.rmtree(before, ignore_errors=True)
    sync_file(folder.parent)


def _check_place(folder: Path) -> None:
    """Raise ValueError where something else than a saved batch would be replaced."""
    if folder.is_dir():
        if others := sorted(path.name for path in folder.iterdir() if path.name not in _FILES):
            raise ValueError(f"{folder}: holds {', '.join(others[:5])}, which is no saved batch; choose another folder")
    elif folder.exists():
        raise ValueError(f"{folder}: is a file; choose another folder")


def _check_fields(batch: DataProto, folder: Path) -> None:
    """Raise ValueError for a field that a saved batch has no form for."""
    problems: list[tuple[str, str | None]] = []
    for key, value in batch.tensors.items():
        if isinstance(value, Ragged):
            taken = [part for part in (f"{key}/values", f"{key}/offsets") if part in batch.tensors]
            problem = f"the field {taken[0]!r} has the name of a part of it" if taken else None
            problems.append((f"tensors[{key!a}]", problem or problem_of(key, value.values)))
        else:
            problems.append((f"tensors[{key!a}]", problem_of(key, value)))
    for key, array in batch.non_tensors.items():
        problems.append((f"non_tensors[{key!a}]", _array_problem(key, array)))
    for field, problem in problems:
        if problem is not None:
            raise ValueError(f"{folder}: cannot write {field}: {problem}")


def _array_problem(key: Any, array: np.ndarray) -> str | None:
    if not isinstance(key, str):
        return f"its name must be text, got {key!r}"
    if type(array) is not np.ndarray:
        return f"it is a {type(array).__name__}; make it a plain array"
    if array.dtype == object and array.ndim > 1:
        return f"it has objects in {array.ndim} dimensions; make it one, with a list in each row"
    if array.dtype != object and array.dtype.kind not in "biufcSU":
        return f"it is {array.dtype}; use numbers or text"
    return None


def _write(batch: DataProto, aside: Path) -> None:
    write_tensors(aside / "batch.safetensors", flatten_tensors(batch))
    content = {
        "format": FORMAT,
        "ragged": [key for key, value in batch.tensors.items() if isinstance(value, Ragged)],
        "tensors": list(batch.tensors),
        "objects": {key: encode(a.tolist(), key) for key, a in batch.non_tensors.items() if a.dtype == object},
        "arrays": {key: encode(a, key) for key, a in batch.non_tensors.items() if a.dtype != object},
        "meta_info": encode(batch.meta_info, "meta_info"),
    }
    (aside / "batch.json").write_text(json.dumps(content))
    for path in [*aside.iterdir(), aside]:
        sync_file(path)


def load_batch(folder: str | Path, kind: type[P] = DataProto) -> P:
    """The batch in `folder`, as `kind`. Its tensors are mapped from the file and read when they are used.

    Raises:
        ValueError: no batch there, or one that is broken or does not fit `kind`.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / "batch.json").read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"batch format {content['format']}, this version reads {FORMAT}")
        flat = load_tensors(folder / "batch.safetensors")
        tensors = {
            key: Ragged(flat[f"{key}/values"], flat[f"{key}/offsets"]) if key in content["ragged"] else flat[key]
            for key in content["tensors"]
        }
        arrays = {key: object_array(decode(values)) for key, values in content["objects"].items()}
        arrays |= {key: decode(value) for key, value in content["arrays"].items()}
        meta_info = decode(content["meta_info"])
    except KeyError as error:
        raise ValueError(f"{folder}: not a saved batch: it has no {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{folder}: not a saved batch: {error}") from error
    try:
        return kind(tensors, arrays, meta_info)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def flatten_tensors(batch: DataProto) -> dict[str, Tensor]:
    """Tensors by name, sharing memory; ragged fields as two."""
    flat: dict[str, Tensor] = {}
    for key, value in batch.tensors.items():
        if isinstance(value, Ragged):
            flat[f"{key}/values"], flat[f"{key}/offsets"] = value.values, value.offsets
        else:
            flat[key] = value
    return flat


def sync_file(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
