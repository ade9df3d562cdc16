"""How one Megatron parameter is made of Hugging Face tensors, and back.

A rule names its Hugging Face tensors (`{layer}` and `{expert}` stand for numbers) and knows the layout of Megatron's
tensor parallelism: `shard` cuts the part of one worker out of the checkpoint's tensors, reading only what it needs, and
`merge` puts the parts of all workers together again. With one worker they convert whole tensors.

Shape letters: H hidden size, V vocabulary, I width of the MLP, G key-value heads, Q query heads of one key-value head,
D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A tensor of the checkpoint, read when it is indexed: safetensors' PySafeSlice, or a Tensor."""

    def __getitem__(self, index: Any) -> Tensor: ...


def shape_of(source: Any) -> list[int]:
    return list(source.get_shape() if hasattr(source, "get_shape") else source.shape)


def check_shapes(rule: Rule, names: Sequence[str], sources: Sequence[Source], part: Sequence[int], size: int) -> None:
    """Check that the tensors have the shapes that a parameter, of shape `part` on each of `size` workers, is made of.

    Raises:
        ValueError: with the name, the shape that config.json asks for and the one that is there.
    """
    blank = torch.empty(tuple(part), device="meta")
    whole = rule.merge([blank] * (1 if rule.is_replicated else size))
    for name, source, expected in zip(names, sources, whole, strict=True):
        if shape_of(source) != list(expected.shape):
            raise ValueError(
                f"{name} does not fit config.json: must have shape {tuple(expected.shape)}, got "
                f"{tuple(shape_of(source))}"
            )


class Rule(Protocol):
    """One Megatron parameter."""

    @property
    def names(self) -> tuple[str, ...]:
        """Templates of the Hugging Face names, in the order that `shard` takes and `merge` gives."""
        ...

    @property
    def is_replicated(self) -> bool:
        """Every worker's part is the whole."""
        ...

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        """The part of worker `rank` of `size`."""
        ...

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors from the parts of all workers, in rank order."""
        ...


@dataclass(frozen=True, order=True)
class Place:
    """A parameter of the whole model: what it is, in which layer, of which expert (-1: none)."""

    layer: int
    expert: int
    key: str  # as in the rules

    def names(self, rule: Rule) -> list[str]:
        return [name.format(layer=self.layer, expert=self.expert) for name in rule.names]


def _part(length: int, rank: int, size: int, what: str) -> slice:
    if length % size:
        raise ValueError(f"{what} has {length} rows or columns, which {size} tensor-parallel workers cannot share")
    return slice(length // size * rank, length // size * (rank + 1))


@dataclass(frozen=True)
class Whole:
    """Every worker holds all of it."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def is_replicated(self) -> bool:
        return type(self) is Whole

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        return sources[0][:]

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]]


@dataclass(frozen=True)
class Rows(Whole):
    """Column-parallel: each worker holds consecutive rows (outputs)."""

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        return sources[0][_part(shape_of(sources[0])[0], rank, size, self.name)]

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]]


@dataclass(frozen=True)
class Columns(Whole):
    """Row-parallel: each worker holds consecutive columns (inputs)."""

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        if size == 1:
            return sources[0][:]
        return sources[0][:, _part(shape_of(sources[0])[1], rank, size, self.name)]

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(tuple(parts), dim=1) if len(parts) > 1 else parts[0]]


@dataclass(frozen=True)
class Vocabulary(Whole):
    """Rows `[V, H]`, padded with zeros at the end until the workers can share them."""

    vocab_size: int

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        rows = -(-self.vocab_size // size)
        first = min(rank * rows, self.vocab_size)
        own = sources[0][first : min(first + rows, self.vocab_size)]
        return own if len(own) == rows else torch.cat([own, own.new_zeros(rows - len(own), own.size(1))])

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
        return [whole[: self.vocab_size]]


@dataclass(frozen=True)
class Stacked:
    """Several matrices whose parts lie one below the other in each worker: gate and up projection of a gated MLP."""

    names: tuple[str, ...]
    is_replicated: bool = False

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        parts = [s[_part(shape_of(s)[0], rank, size, n)] for s, n in zip(sources, self.names, strict=True)]
        return torch.cat(parts)

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        pieces = [part.chunk(len(self.names)) for part in parts]
        if len(parts) == 1:
            return list(pieces[0])
        return [torch.cat([piece[i] for piece in pieces]) for i in range(len(self.names))]


@dataclass(frozen=True)
class StackedInOne(Whole):
    """Gate and up projection in one Hugging Face matrix `[2I, H]`: each worker takes its rows of both halves."""

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        half = shape_of(sources[0])[0] // 2
        if size == 1:
            return sources[0][:]
        own = _part(half, rank, size, self.name)
        return torch.cat([sources[0][own], sources[0][half + own.start : half + own.stop]])

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if len(parts) == 1:
            return [parts[0]]
        return [torch.cat([part.chunk(2)[i] for i in range(2) for part in parts])]


@dataclass(frozen=True)
class QueryKeyValue:
    """Megatron's one matrix `[G (Q + 2) D, H]` (or bias): for each key-value head its queries, its key, its value."""

    names: tuple[str, ...]  # query, key, value; or one matrix in which the three lie one below the other
    groups: int  # G
    heads_per_group: int  # Q
    head_dim: int  # D
    is_replicated: bool = False

    def shard(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        own = _part(self.groups, rank, size, self.names[0])
        starts = [0, 0, 0] if len(sources) == 3 else [0, self._rows(0), self._rows(1) + self._rows(0)]
        blocks = []
        for i, start in enumerate(starts):
            rows = self._rows(i) // self.groups  # of one key-value head
            block = sources[i if len(sources) == 3 else 0][start + own.start * rows : start + own.stop * rows]
            blocks.append(block.unflatten(0, (own.stop - own.start, rows)))
        return torch.cat(blocks, dim=1).flatten(0, 1)

    def merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
        grouped = whole.unflatten(0, (self.groups, -1))
        sizes = [self._rows(i) // self.groups for i in range(3)]
        blocks = [block.flatten(0, 1) for block in grouped.split(sizes, dim=1)]
        return blocks if len(self.names) == 3 else [torch.cat(blocks)]

    def _rows(self, which: int) -> int:
        return self.groups * self.head_dim * (self.heads_per_group if which == 0 else 1)
