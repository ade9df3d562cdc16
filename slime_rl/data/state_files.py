"""State on disk: what is small as JSON, tensors beside it in safetensors. No pickle, and no copy of the tensors.

NAME.json           JSON values; a tensor is {"__tensor__": "tensor_7"}
NAME.safetensors    the tensors; missing when there are none
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from slime_rl.data.tensor_file import load_tensors, write_tensors

_TAG = "__tensor__"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, JSON values with tensors at any depth, to `path` (NAME.json) and NAME.safetensors.

    Raises:
        ValueError: something that is neither; names where it sits.
        OSError: the disk is full.
    """
    tensors: dict[str, Tensor] = {}
    content = _take_out(state, tensors, "state")
    if tensors:
        write_tensors(path.with_suffix(".safetensors"), tensors)
    path.write_text(json.dumps(content))


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` was given. Tensors are mapped from the file and read when they are used.

    Raises:
        ValueError: a file is missing or broken; names it.
    """
    beside = path.with_suffix(".safetensors")
    try:
        content = json.loads(path.read_text())
        tensors = load_tensors(beside) if beside.is_file() else {}
        state = _put_back(content, tensors)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path}: {beside.name} beside it lacks {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(state).__name__}")
    return state


def _take_out(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        name = f"tensor_{len(tensors)}"
        tensors[name] = value
        return {_TAG: name}
    if kind in (list, tuple):
        if kind is list and all(type(item) is int for item in value):
            return value
        return [_take_out(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise ValueError(f"{where} has a key that is not text, which JSON cannot hold")
        return {key: _take_out(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
    raise ValueError(f"{where} is a {kind.__module__}.{kind.__qualname__}; state must be JSON values and tensors")


def _put_back(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return value if set(map(type, value)) == {int} else [_put_back(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TAG} and isinstance(value[_TAG], str):
        return tensors[value[_TAG]]
    return {key: _put_back(item, tensors) for key, item in value.items()}
