"""A DataProto on disk: tensors in safetensors, everything else in JSON; no pickle, and never half a file.

FOLDER/batch.safetensors   dense tensors as NAME, ragged ones as NAME/values and NAME/offsets
FOLDER/batch.json          kinds of the fields, object arrays, meta info
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor

from slime_rl.data.codec import decode, encode
from slime_rl.data.proto import DataProto, object_array
from slime_rl.data.ragged import Ragged
from slime_rl.data.tensor_file import load_tensors, write_tensors

FORMAT = 1
P = TypeVar("P", bound=DataProto)


def save_batch(batch: DataProto, folder: str | Path) -> None:
    """Write `batch` to `folder`, which appears whole or not at all; one that exists is replaced.

    Raises:
        ValueError: an object that cannot be written; names the field and row.
    """
    folder = Path(folder)
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
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
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    sync_file(folder.parent)


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
    return kind(tensors, arrays, meta_info)


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
