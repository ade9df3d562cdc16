"""Logged samples by step and group. Only where each line is stays in memory: a long run has gigabytes of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from slime_rl.dashboard.line_file import LineFile, read_step_line
from slime_rl.observability.metrics import reward_value
from slime_rl.observability.tracker import TRAINING

MAX_SAMPLES = 1024  # of one step that are looked at; a page shows a few groups of them
GROUPS_PER_PAGE = 8
MAX_TEXT = 20_000  # characters of one text that a page gets; a browser is lost in megabytes of them
ORDERS = ("as trained", "lowest reward", "highest reward", "largest spread")
_TEXTS = ("prompt", "response", "label", "reward_info", "metadata")
# How the tracker begins a line; others, of older or foreign writers, are parsed whole.
_HEAD = re.compile(rb'\{"step": (\d+), (?:"kind": "(\w+)", )?"index": -?\d+, "group_index": (-?\d+),')


@dataclass(frozen=True, slots=True)
class Line:
    """Where a sample is."""

    kind: str
    step: int
    group_index: int
    offset: int
    length: int


def find_line(line: bytes, offset: int) -> Line:
    """Raises ValueError for what is no sample."""
    if head := _HEAD.match(line):
        kind = head[2].decode() if head[2] else TRAINING
        return Line(kind, int(head[1]), int(head[3]), offset, len(line))
    value = read_step_line(line, offset)
    group = value.get("group_index", 0)
    if not isinstance(group, int):
        raise ValueError(f"`group_index` must be a whole number, got {group!r}")
    return Line(str(value.get("kind", TRAINING)), value["step"], group, offset, len(line))


class Samples:
    """samples.jsonl of one run."""

    def __init__(self, path: Path) -> None:
        self.file: LineFile[Line] = LineFile(path, find_line)
        self._of_step: dict[tuple[str, int], list[Line]] = {}
        self._indexed: tuple[Any, int] = (None, 0)  # generation of the file, and lines of it that are in _of_step
        self._read: tuple[Any, list[dict[str, Any]]] = (None, [])

    def look(self) -> None:
        lines = self.file.look()
        generation, count = self._indexed
        if generation != self.file.generation or count > len(lines):
            self._of_step, count = {}, 0
        for line in lines[count:]:
            self._of_step.setdefault((line.kind, line.step), []).append(line)
        self._indexed = (self.file.generation, len(lines))

    def steps(self, kind: str) -> list[int]:
        return sorted(step for of, step in self._of_step if of == kind)

    def read(self, kind: str, step: int) -> list[dict[str, Any]]:
        """The samples of a step, the first MAX_SAMPLES of them."""
        lines = self._of_step.get((kind, step), [])[:MAX_SAMPLES]
        key = (self.file.generation, kind, step, len(lines))
        if key != self._read[0]:
            found = []
            if lines:
                with self.file.path.open("rb") as file:
                    for line in lines:
                        file.seek(line.offset)
                        found.append(_read_sample(file.read(line.length)))
            self._read = (key, [sample for sample in found if sample is not None])
        return self._read[1]

    def page(self, kind: str, step: int | None, order: str, find: str, first: int) -> dict[str, Any]:
        """Groups from the `first` on of a step (the newest when None); `find` is text that a sample must have.

        Raises:
            ValueError: an unknown order.
        """
        self.look()
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        steps = self.steps(kind)
        chosen = steps[-1] if step is None and steps else step
        samples = [] if chosen is None else self.read(kind, chosen)
        groups = by_group([s for s in samples if not find or find.lower() in _text(s).lower()])
        keys = {
            "lowest reward": lambda group: (group["mean"] is None, group["mean"]),
            "highest reward": lambda group: (group["mean"] is None, -(group["mean"] or 0.0)),
            "largest spread": lambda group: -(group["std"] or 0.0),
        }
        if order in keys:
            groups.sort(key=keys[order])
        return {
            "kinds": sorted({of for of, _ in self._of_step}, reverse=True),
            "kind": kind,
            "steps": steps,
            "step": chosen,
            "num_samples": len(self._of_step.get((kind, chosen), ())) if chosen is not None else 0,
            "num_read": len(samples),
            "num_groups": len(groups),
            "first": first,
            "per_page": GROUPS_PER_PAGE,
            "groups": [shortened(group) for group in groups[first : first + GROUPS_PER_PAGE]],
        }

    def spread(self, step: int | None) -> dict[str, Any]:
        """Lengths, rewards and token ages of the training samples that were logged of a step (the newest when None)."""
        self.look()
        steps = self.steps(TRAINING)
        chosen = steps[-1] if step is None and steps else step
        samples = [] if chosen is None else self.read(TRAINING, chosen)
        ages: dict[int, int] = {}
        for sample in samples:
            for version in sample.get("weight_versions_by_token") or ():
                if isinstance(version, int) and version >= 0:
                    ages[sample["step"] - version] = ages.get(sample["step"] - version, 0) + 1
        return {
            "steps": steps,
            "step": chosen,
            "lengths": [s["response_length"] for s in samples if isinstance(s.get("response_length"), int)],
            "rewards": [r for s in samples if (r := reward_value(s.get("reward"))) is not None],
            "ages": sorted(ages.items()),
        }


def _read_sample(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not there any more: the file was cut since the last look."""
    try:
        return read_step_line(line, 0)
    except ValueError:
        return None


def by_group(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups in order of appearance, each with mean and deviation of the rewards of its samples here."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(sample.get("group_index"), []).append(sample)
    return [_group(members) for members in groups.values()]


def _group(members: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [reward_value(member.get("reward")) for member in members]
    known = [reward for reward in rewards if reward is not None]
    mean = fmean(known) if known else None
    for member, reward in zip(members, rewards, strict=True):
        member["reward"] = reward
        member["reward_minus_mean"] = None if reward is None or mean is None else reward - mean
    first = members[0]
    return {
        "group_index": first.get("group_index"),
        "prompt": first.get("prompt", ""),
        "label": first.get("label"),
        "mean": mean,
        "std": pstdev(known) if known else None,
        "samples": members,
    }


def shortened(group: dict[str, Any]) -> dict[str, Any]:
    """The same with the middle of long texts left out."""
    samples = [sample | _cut({name: sample[name] for name in _TEXTS if name in sample}) for sample in group["samples"]]
    return group | {"prompt": _cut(group["prompt"]), "label": _cut(group["label"]), "samples": samples}


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        left_out = len(value) - MAX_TEXT
        return f"{value[: MAX_TEXT // 2]}\n[… {left_out:,} characters …]\n{value[-MAX_TEXT // 2 :]}"
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else value


def _text(sample: dict[str, Any]) -> str:
    prompt = sample.get("prompt", "")
    return f"{prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)}\n{sample.get('response')}"
