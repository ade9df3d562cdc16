"""Nested Python values as JSON and back, exactly: what JSON has no word for travels under a tag.

Tuples, bytes, dictionaries with other keys than text, numpy arrays and tensors come back as what they were. Anything
else is an error that names where it sits, rather than something that comes back as another type, and no pickle.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from torch import Tensor

from slime_rl.data.arrays import array_to_tensor, tensor_to_array

_TAG = "__slime_rl__"
_ARRAY_KINDS = "biufcSUmM"  # not objects and not records


def encode(value: Any, where: str = "value") -> Any:
    """`value` in JSON's types.

    Raises:
        ValueError: something that cannot be written, with its path.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "items": pairs}
    if kind is tuple:
        return {_TAG: "tuple", "items": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if kind in (bytes, bytearray):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if kind is Tensor:
        array, name = tensor_to_array(value)
        return {_TAG: "tensor", "torch_dtype": name, **_encode_array(array)}
    if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
        return {_TAG: "array", **_encode_array(value)}
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, str | int | float):  # subclasses such as StrEnum and IntEnum, as what they stand for
        return encode(next(base for base in (str, int, float) if isinstance(value, base))(value), where)
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(f"{where} is a {name}, which cannot be saved; use plain Python values")


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "bytes":
        return base64.b64decode(value["data"])
    array = np.frombuffer(bytearray(base64.b64decode(value["data"])), dtype=np.dtype(value["dtype"]))
    array = array.reshape(value["shape"])
    return array_to_tensor(array, value["torch_dtype"]) if kind == "tensor" else array


def _encode_array(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).data if array.size else b"").decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}
