"""Groups in columns: token fields ragged and unpadded, the rest as one JSON text per group.

About 17 bytes per token, where Python lists take a hundred; a file of it can be mapped and read group by group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_rl.data.codec import decode, encode
from slime_rl.data.proto import DataProto, object_array
from slime_rl.data.ragged import Ragged
from slime_rl.data.samples import from_samples, to_samples
from slime_rl.data.storage import flatten_tensors
from slime_rl.data.tensor_file import load_tensors, write_tensors
from slime_rl.types import Group

_OBJECTS = ("prompt", "label", "metadata", "response", "reward_info", "status")


@dataclass(frozen=True)
class PackedGroups:
    """G groups with N samples in all, in order."""

    samples: DataProto  # [N] the tensors of `data.samples.from_samples`
    groups: DataProto  # [G] group_index int64, num_samples int64, text Ragged uint8

    @classmethod
    def pack(cls, groups: Sequence[Group]) -> PackedGroups:
        """Raises ValueError when prompt, label or metadata hold something that cannot be written."""
        samples = from_samples([sample for group in groups for sample in group.samples])
        columns = {name: list(samples.non_tensors[name]) for name in _OBJECTS}
        texts, first = [], 0
        for group in groups:
            texts.append(_group_text(group, columns, first))
            first += len(group.samples)
        tensors: dict[str, Tensor | Ragged] = {
            "group_index": torch.tensor([group.group_index for group in groups], dtype=torch.int64),
            "num_samples": torch.tensor([len(group.samples) for group in groups], dtype=torch.int64),
            "text": Ragged.from_list([np.frombuffer(text, dtype=np.uint8) for text in texts], torch.uint8),
        }
        return cls(DataProto(samples.tensors), DataProto(tensors))

    def unpack(self, rows: Sequence[int]) -> list[Group]:
        """The groups at `rows`, equal to what was packed."""
        part = self.select(rows)
        contents = [json.loads(bytes(text.numpy())) for text in part.groups["text"].rows()]
        objects: dict[str, list[Any]] = {name: [] for name in _OBJECTS}
        for content in contents:
            first = content["samples"][0] if content["samples"] else {}
            for own in content["samples"]:
                for name in _OBJECTS:
                    objects[name].append(decode(own.get(name, first[name])))
        arrays = {name: object_array(values) for name, values in objects.items()}
        samples = iter(to_samples(DataProto(part.samples.tensors, arrays)))
        return [
            Group(
                group_index=index,
                source_index=content["source_index"],
                epoch=content["epoch"],
                attempts=content["attempts"],
                left_out=content.get("left_out", {}),
                replays=content.get("replays", 0),
                samples=[next(samples) for _ in content["samples"]],
            )
            for index, content in zip(part.groups["group_index"].tolist(), contents, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> PackedGroups:
        """The groups at `rows`, in that order."""
        if list(rows) == list(range(len(self))):
            return self
        ends = torch.cumsum(self.groups["num_samples"], 0).tolist()
        counts = self.groups["num_samples"].tolist()
        sample_rows = [i for row in rows for i in range(ends[row] - counts[row], ends[row])]
        return PackedGroups(self.samples.select_rows(sample_rows), self.groups.select_rows(list(rows)))

    @classmethod
    def concat(cls, parts: Sequence[PackedGroups]) -> PackedGroups:
        if len(parts) == 1:
            return parts[0]
        return cls(DataProto.concat([p.samples for p in parts]), DataProto.concat([p.groups for p in parts]))

    def clone(self) -> PackedGroups:
        """A copy in memory of its own."""
        samples = self.samples.select(list(self.samples.tensors), deepcopy=True)
        return PackedGroups(samples, self.groups.select(list(self.groups.tensors), deepcopy=True))

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes + self.groups.nbytes

    def __len__(self) -> int:
        return len(self.groups)

    def save(self, path: Path) -> None:
        """One safetensors file, whole or not at all. Not synced: a resume takes groups from the checkpoint."""
        aside = path.with_name(path.name + ".partial")
        try:
            write_tensors(aside, self.to_flat())
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> PackedGroups:
        """Mapped from the file: memory holds what is read of it."""
        return cls.from_flat(load_tensors(path))

    @classmethod
    def from_flat(cls, flat: dict[str, Tensor]) -> PackedGroups:
        parts: dict[str, dict[str, Tensor | Ragged]] = {"samples": {}, "groups": {}}
        for name, value in flat.items():
            part, key = name.split("/", 1)
            if key.endswith("/values"):
                key = key.removesuffix("/values")
                parts[part][key] = Ragged(value, flat[f"{part}/{key}/offsets"])
            elif not key.endswith("/offsets"):
                parts[part][key] = value
        return cls(DataProto(parts["samples"]), DataProto(parts["groups"]))

    def to_flat(self) -> dict[str, Tensor]:
        """Tensors by name, sharing memory."""
        flat = {f"samples/{key}": value for key, value in flatten_tensors(self.samples).items()}
        return flat | {f"groups/{key}": value for key, value in flatten_tensors(self.groups).items()}


def _group_text(group: Group, columns: dict[str, list[Any]], first: int) -> bytes:
    """What is no tensor in a group. Later samples leave out what equals the first one's: the prompt, nearly always."""
    samples: list[dict[str, Any]] = []
    for row in range(first, first + len(group.samples)):
        where = f"group {group.group_index}: "
        own = {name: encode(values[row], where + name) for name, values in columns.items()}
        samples.append({k: v for k, v in own.items() if v != samples[0][k]} if samples else own)
    content: dict[str, Any] = {
        "source_index": group.source_index,
        "epoch": group.epoch,
        "attempts": group.attempts,
        "samples": samples,
    }
    if group.left_out:
        content["left_out"] = group.left_out
    if group.replays:
        content["replays"] = group.replays
    return json.dumps(content, separators=(",", ":")).encode()
