"""Can a group be kept, so that it comes back equal from memory, file and checkpoint, and how much memory does it take?

Asked before the ledger changes: groups are packed later and many at a time, where one that cannot be would stand in the
way of all the others.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_rl.buffer.packed import PackedGroups
from slime_rl.types import MAX_REWARD, Group, Sample, Status

# Python objects: a pointer and a number object for each token of the four lists, and the sample itself.
_BYTES_PER_TOKEN, _BYTES_PER_SAMPLE = 100, 1500
_PLAIN = (type(None), bool, int, float)
_EMPTY = {*_PLAIN, str, bytes, list, tuple, dict}
_FIVE, _FOUR = struct.Struct("=5q"), struct.Struct("=4q")
_DTYPES = {*(torch.float64, torch.float32, torch.float16, torch.bfloat16), *(torch.int64, torch.int32, torch.int16)}
_DTYPES |= {torch.int8, torch.uint8, torch.bool}
_MAX_DEPTH = 50  # nesting beyond this is tried rather than trusted: the writer of JSON has a limit
_TOKEN_FIELDS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")
_NUMBERS = ("index", "group_index", "rollout_id", "prompt_length", "reward")
_OWN = ("group_index", "source_index", "epoch", "attempts", "replays", "left_out")


class _DoubtError(Exception):
    """Only an attempt can say whether this can be packed."""


def check_and_weigh(group: Group) -> int:
    """Estimate of the bytes of `group` as objects; what its samples share, such as an image, counts once.

    Raises:
        ValueError: it cannot be packed, or would not come back as it is; names group, sample and field.
    """
    try:
        return _weigh(group)
    except (_DoubtError, struct.error, TypeError, AttributeError, OverflowError, RecursionError):
        packed_bytes = _try_out(group)
    tokens = sum(len(sample.tokens) for sample in group.samples)
    return _BYTES_PER_SAMPLE * len(group.samples) + _BYTES_PER_TOKEN * tokens + packed_bytes


def _weigh(group: Group) -> int:
    """The quick way, for what groups nearly always are. It looks at every token, so each line of it counts."""
    _FIVE.pack(group.group_index, group.source_index, group.epoch, group.attempts, group.replays)
    if group.left_out and not all(type(k) is str and type(v) is int for k, v in group.left_out.items()):
        raise _DoubtError
    seen: set[int] = set()
    total = 0
    for sample in group.samples:
        _check_numbers(sample)
        total += _BYTES_PER_SAMPLE + _BYTES_PER_TOKEN * len(sample.tokens) + len(sample.response)
        for value in (sample.prompt, sample.label, sample.metadata, sample.reward_info):
            if value:  # what is empty weighs nothing, and is no other kind of object than it looks
                total += _bytes_of(value, seen, 0)
            elif type(value) not in _EMPTY:
                raise _DoubtError
    return total


def _check_numbers(sample: Sample) -> None:
    """Raise where a list of numbers is not of the kind, range or length that it must be."""
    tokens, mask = sample.tokens, sample.loss_mask
    versions, log_probs = sample.weight_versions, sample.rollout_log_probs
    n = len(mask)
    if not (len(versions) == len(log_probs) == n == len(tokens) - sample.prompt_length):
        raise _DoubtError
    if type(sample.status) is not Status or type(sample.response) is not str:
        raise _DoubtError
    _FOUR.pack(sample.index, sample.group_index, sample.rollout_id, sample.prompt_length)
    reward = sample.reward
    if reward is not None and not (isinstance(reward, int | float) and -MAX_REWARD <= reward <= MAX_REWARD):
        raise _DoubtError
    struct.pack(f"={len(tokens)}I", *tokens)
    if n:
        if type(sum(log_probs)) is not float:
            struct.pack(f"={n}d", *log_probs)
        first, version = mask[0], versions[0]
        if type(first) is not int or not 0 <= first <= 1 or mask.count(first) != n:
            struct.pack(f"={n}b", *mask)
        if type(version) is not int or not -1 <= version < 1 << 31 or versions.count(version) != n:
            struct.pack(f"={n}i", *versions)


def _bytes_of(value: Any, seen: set[int], depth: int) -> int:
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and value.bit_length() > 63:
            raise _DoubtError  # JSON takes numbers of 4,300 digits
        return 32
    if kind is dict and depth < _MAX_DEPTH:
        keys = sum(_bytes_of(key, seen, depth + 1) for key in value)
        return keys + sum(_bytes_of(item, seen, depth + 1) for item in value.values())
    if (kind is list or kind is tuple) and depth < _MAX_DEPTH:
        return sum(_bytes_of(item, seen, depth + 1) for item in value)
    if kind is str or kind is bytes or kind is bytearray:
        nbytes = len(value)
    elif (kind is np.ndarray and value.dtype.kind in "biufc") or (kind is Tensor and _is_plain(value)):
        nbytes = int(value.nbytes)
    else:
        raise _DoubtError
    if id(value) in seen:
        return 0
    seen.add(id(value))
    return nbytes


def _is_plain(tensor: Tensor) -> bool:
    is_view = tensor.is_conj() or tensor.is_neg()
    return tensor.dtype in _DTYPES and tensor.layout is torch.strided and tensor.device.type != "meta" and not is_view


def _try_out(group: Group) -> int:
    """Pack the group alone, see whether it comes back equal, and return its packed size."""
    try:
        for sample in group.samples:
            _check_lengths(sample)
            _check_range(sample)
        packed = PackedGroups.pack([group])
        (again,) = packed.unpack([0])
    except Exception as error:  # objects of users fail in ways of their own
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        where = "" if text.startswith("group ") else f"group {group.group_index}: "
        raise ValueError(f"{where}{text}, so the buffer cannot keep it") from error
    changed = [(f"its {name}", getattr(group, name), getattr(again, name)) for name in _OWN]
    for ours, theirs in zip(group.samples, again.samples, strict=True):
        what = f"of sample {ours.index}"
        changed += [(f"{name} {what}", getattr(ours, name), getattr(theirs, name)) for name in _NUMBERS]
        changed += [(f"{name} {what}", list(getattr(ours, name)), getattr(theirs, name)) for name in _TOKEN_FIELDS]
    for what, before, after in changed:
        if not _same(before, after):
            raise ValueError(
                f"group {group.group_index}: {what} cannot be kept: {_first_difference(before, after)}; tokens, masks "
                "and versions are whole numbers"
            )
    return packed.nbytes


def _check_lengths(sample: Sample) -> None:
    """Raises ValueError where the fields of a sample do not have an entry for each of its response tokens."""
    have = {name: len(getattr(sample, name)) for name in _TOKEN_FIELDS[1:]}
    wanted = len(sample.tokens) - sample.prompt_length
    if odd := {name: length for name, length in have.items() if length != wanted}:
        raise ValueError(
            f"group {sample.group_index}: sample {sample.index} has {wanted} response tokens, but {odd}; grow "
            "responses with Sample.append_tokens only"
        )


def _check_range(sample: Sample) -> None:
    where, reward = f"group {sample.group_index}: sample {sample.index}", sample.reward
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= MAX_REWARD):
        raise ValueError(f"{where} has reward {reward!r}, which is no number that float32 can hold")
    if negative := [token for token in sample.tokens if token < 0]:
        raise ValueError(f"{where} has token {negative[0]}; tokens must be >= 0")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or bool(a != a and b != b)


def _first_difference(before: Any, after: Any) -> str:
    if isinstance(before, list):
        pairs = ((i, x, y) for i, (x, y) in enumerate(zip(before, after, strict=False)) if not _same(x, y))
        at, before, after = next(pairs, ("the end", before, after))
        return f"{before!r:.60} would come back as {after!r:.60} at {at}"
    return f"{before!r:.60} would come back as {after!r:.60}"
