"""Samples of one prompt in one pass that computes the prompt once.

    sample by sample        p p p a a   p p p b b b   q q c
    with shared prompts     p p p a b b   q q              (+ last tokens left out: nothing is predicted from them)

Every token attends to what it attends to in its own sequence and has the same position there, so hidden states, loss
and gradients are those of the separate sequences up to rounding. Needs attention that takes any set of keys, which
slime_rl/trainer/cpu/attention.py does and Transformer Engine's does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_rl.trainer.sequences import Sequences, ranges


@dataclass
class SharedPromptParams(PackedSeqParams):
    """What attention must know. Tokens lie block by block, each of them a query of its block.

    `key_order [k]` lists the keys of all sequences of all blocks; `blocks` holds (sequences, queries, keys) of each:
    its queries are the end of its keys, and all its sequences have the same two lengths.
    """

    key_order: Tensor | None = None
    blocks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class SharedPacking:
    """The tokens of a micro-batch, and which of them predicts each response token of its rows, in the rows' order."""

    input_ids: Tensor  # [t] int64
    position_ids: Tensor  # [t] int64
    params: SharedPromptParams
    predict_at: Tensor  # [T] int64
    targets: Tensor  # [T] int64


def prompt_families(rows: list[int], sequences: Sequences, cap: int) -> list[list[int]]:
    """Rows with the same prompt together, in chunks that `cap` tokens hold (a longer single row is alone).

    Nothing is predicted from a response's last token, so a response of one token adds none to its chunk.
    """
    chunks: list[list[int]] = []
    open_chunks: dict[bytes, tuple[int, int]] = {}  # prompt -> (its chunk with room, tokens in that)
    for row in rows:
        prompt = sequences.prompt_keys[row]
        added = sequences.response_length(row) - 1
        chunk, size = open_chunks.get(prompt, (None, 0))
        if chunk is None or size + added > cap:
            chunk, size = len(chunks), sequences.prompt_lengths[row]
            chunks.append([])
        chunks[chunk].append(row)
        open_chunks[prompt] = (chunk, size + added)
    return chunks


def num_tokens(rows: list[int], sequences: Sequences) -> int:
    """Tokens of a pass over rows with one prompt."""
    return sequences.prompt_lengths[rows[0]] + sum(sequences.response_length(row) - 1 for row in rows)


def pack_shared(rows: list[int], sequences: Sequences, multiple: int) -> SharedPacking:
    """All rows in one pass, filled up to a multiple of `multiple` tokens."""
    parts = _Parts()
    number_of: dict[bytes, int] = {}
    prompts, responses = [], []  # the parts of each row
    for row in rows:
        first, length = sequences.starts[row], sequences.prompt_lengths[row]
        key = sequences.prompt_keys[row]
        if key not in number_of:
            number_of[key] = parts.add(first, length, 0, -1)
        prompts.append(number_of[key])
        responses.append(parts.add(first + length, sequences.response_length(row) - 1, length, number_of[key]))
    parts.place()
    lengths = np.array([sequences.response_length(row) for row in rows], dtype=np.int64)
    predict_at = ranges(parts.at[responses] - 1, lengths)
    predict_at[lengths.cumsum() - lengths] = parts.at[prompts] + parts.size[prompts] - 1
    num_filling = -parts.num_tokens % multiple if rows else multiple
    ids, positions, keys = parts.tokens(sequences.tokens.numpy())
    filling = np.arange(num_filling)
    blocks = parts.shapes + ([(1, num_filling, num_filling)] if num_filling else [])
    longest = int(max(positions.max(initial=0), num_filling - 1)) + 1
    return SharedPacking(
        input_ids=torch.from_numpy(np.concatenate([ids, filling * 0])),
        position_ids=torch.from_numpy(np.concatenate([positions, filling])),
        params=SharedPromptParams(
            qkv_format="sbhd",  # Megatron then rotates by the angles it is given, token by token
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            key_order=torch.from_numpy(np.concatenate([keys, filling + parts.num_tokens])),
            blocks=tuple(blocks),
        ),
        predict_at=torch.from_numpy(predict_at),
        targets=sequences.tokens[torch.from_numpy(ranges(parts.first[responses], lengths))],
    )


class _Parts:
    """Prompts, and responses without their last tokens: each `size` tokens after the `seen` ones of its prompt.

    Those with the same two numbers make a block. Numpy, because of the thousands of them a step has.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def add(self, first: int, size: int, seen: int, prompt: int) -> int:
        """A part whose tokens begin at `first` of all sequences, after those of part `prompt`; its number."""
        number = len(self._rows)
        self._rows.append((first, size, seen, prompt))
        if size:
            self._blocks.setdefault((size, seen), []).append(number)
        return number

    def place(self) -> None:
        """Put the parts block after block; from here on `first`, `size` and `at` are `[parts]`."""
        self.first, self.size, _, self._prompt = np.array(self._rows, dtype=np.int64).reshape(-1, 4).T
        self.at = np.zeros(len(self._rows), dtype=np.int64)
        self.num_tokens = 0
        for (size, _), members in self._blocks.items():
            self.at[members] = self.num_tokens + size * np.arange(len(members))
            self.num_tokens += size * len(members)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(parts, queries, keys) of every block."""
        return [(len(members), size, seen + size) for (size, seen), members in self._blocks.items()]

    def tokens(self, content: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, positions, keys) of all blocks."""
        nothing = np.zeros(0, dtype=np.int64)
        ids, positions, keys = [nothing], [nothing], [nothing]
        for (size, seen), members in self._blocks.items():
            own, before = np.arange(size), np.arange(seen)
            ids.append(content[self.first[members][:, None] + own].ravel())
            positions.append(np.tile(own + seen, len(members)))
            of_prompt = self.at[self._prompt[members]][:, None] + before
            keys.append(np.hstack([of_prompt, self.at[members][:, None] + own]).ravel())
        return np.concatenate(ids), np.concatenate(positions), np.concatenate(keys)
