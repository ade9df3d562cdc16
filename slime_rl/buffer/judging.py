"""Asking a user's filter: it judges copies, and one that changes them is told so.

What a filter changes in place would count or not by where the buffer keeps a group: in memory or in a file. Plugins for
other frameworks do it (they set `remove_sample`, or empty the list), so it must not pass in silence.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from slime_rl.data.arrays import tensors_equal
from slime_rl.registry import own_code
from slime_rl.types import Group, Sample

_LISTS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")
_RULE = "a filter says what trains by what it returns, and changes nothing"


def judge_samples(flag: str, group: Group, judge: Callable[[list[Sample]], Any]) -> Any:
    """What `judge`, called with copies of the group's samples, returns.

    Raises:
        ValueError: it raised or changed something; names `flag`, the group and the change.
    """
    where = f", for group {group.group_index}"
    copies = _copies(group.samples)
    given = list(copies)
    with own_code(flag, where):
        answer = judge(given)
    if change := _change_in_samples(group.samples, copies, given):
        raise ValueError(f"{flag} {change}{where}; {_RULE}")
    return answer


def judge_groups(flag: str, where: str, groups: Sequence[Group], judge: Callable[[list[Group]], Any]) -> list[int]:
    """The group_index of each group that `judge`, called with copies of `groups`, returns.

    Raises:
        ValueError: it raised, changed something, or returned something else than groups that it was given.
    """
    copies = [copy.copy(group) for group in groups]
    given: list[list[Sample]] = []
    for ours in copies:
        ours.left_out, ours.samples = dict(ours.left_out), _copies(ours.samples)
        given.append(list(ours.samples))
    with own_code(flag, where):
        chosen = judge(list(copies))
    if not isinstance(chosen, list) or not all(isinstance(group, Group) for group in chosen):
        got = next(type(c).__name__ for c in chosen if not isinstance(c, Group)) if isinstance(chosen, list) else None
        what = f"a list with a {got}" if got else type(chosen).__name__
        raise ValueError(f"{flag} must return a list of groups, got {what}{where}")
    for before, after, samples in zip(groups, copies, given, strict=True):
        if change := _change_in_group(before, after, samples):
            raise ValueError(f"{flag} {change}, for group {before.group_index}{where}; {_RULE}")
    known = {id(group) for group in copies}
    if foreign := sorted({group.group_index for group in chosen if id(group) not in known}):
        raise ValueError(f"{flag} returned groups that it was not given: {foreign[:10]}{where}")
    return [group.group_index for group in chosen]


def _copies(samples: Sequence[Sample]) -> list[Sample]:
    """Samples whose lists and objects are their own; what is shared between samples stays shared."""
    memo: dict[int, Any] = {}
    copies = []
    for sample in samples:
        ours = copy.copy(sample)
        for name, value in vars(sample).items():
            ours.__dict__[name] = list(value) if name in _LISTS else copy.deepcopy(value, memo)
        copies.append(ours)
    return copies


def _change_in_group(before: Group, after: Group, samples: list[Sample]) -> str | None:
    plain = {name: value for name, value in vars(before).items() if name != "samples"}
    now = {name: value for name, value in vars(after).items() if name != "samples"}
    if not _same(plain, now):
        return f"changed {_first_change(plain, now)}"
    return _change_in_samples(before.samples, samples, after.samples)


def _change_in_samples(before: Sequence[Sample], copies: list[Sample], given: Any) -> str | None:
    """What happened to the list `given` that held `copies` of the samples `before`, and to them; None for nothing."""
    if not isinstance(given, list) or len(given) != len(copies):
        left = len(given) if isinstance(given, list) else "none"
        return f"left {left} of {len(copies)} samples in the list that it was given"
    if any(ours is not theirs for ours, theirs in zip(copies, given, strict=True)):
        return "put other samples, or the samples in another order, into the list that it was given"
    for ours, theirs in zip(before, copies, strict=True):
        if not _same(vars(ours), vars(theirs)):
            return f"changed {_first_change(vars(ours), vars(theirs))} of sample {ours.index}"
    return None


def _first_change(before: dict[str, Any], after: dict[str, Any]) -> str:
    if added := sorted(after.keys() - before.keys()):
        return f"{added[0]!r} (set to {after[added[0]]!r:.60}, which means nothing here)"
    if gone := sorted(before.keys() - after.keys()):
        return f"{gone[0]!r} (deleted)"
    name = next(name for name in before if not _same(before[name], after[name]))
    if name in _LISTS and isinstance(after[name], list):
        return f"{name!r} ({len(before[name])} entries before, {len(after[name])} after, not the same)"
    return f"{name!r} from {before[name]!r:.60} to {after[name]!r:.60}"


def _same(a: Any, b: Any) -> bool:
    """Equality of a value and its copy. Objects of own classes cannot be told from copies, and pass."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and (_all_identical(a, b) or all(map(_same, a, b)))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and (a.dtype == object or a.tobytes() == b.tobytes()) and a.shape == b.shape
    if isinstance(a, Tensor):
        return tensors_equal(a, b)
    if isinstance(a, str | int | float | bytes | bytearray):
        return bool(a == b) or (a != a and b != b)
    return True


def _all_identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether the entries are the same objects, told quickly: a copied list of tokens."""
    return all(map(operator.is_, a, b))
