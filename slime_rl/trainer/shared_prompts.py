"""Samples of one prompt in one pass that computes the prompt once.

    sample by sample        p p p a a   p p p b b b   q q c
    with shared prompts     p p p a b b   q q              (+ last tokens left out: nothing is predicted from them)

Every token attends to what it attends to in its own sequence and has the same position there, so hidden states, loss
and gradients are those of the separate sequences up to rounding. Needs attention that takes any set of keys, which
slime_rl/trainer/cpu/attention.py does and Transformer Engine's does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_rl.trainer.sequences import Sequences


@dataclass
class SharedPromptParams(PackedSeqParams):
    """What attention must know. Every token is the query of one block, in block order `query_order [t]`.

    `key_order [k]` lists the keys of all sequences of all blocks; `blocks` holds (sequences, queries, keys) of each:
    its queries are the end of its keys, and all its sequences have the same two lengths.
    """

    query_order: Tensor | None = None
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
        prompt = sequences.prompt(row).numpy().tobytes()
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
    starts: dict[bytes, int] = {}
    ids, positions, predict_at, targets = [], [], [], []
    sequence_parts: list[tuple[Tensor, Tensor]] = []  # (queries, keys) of a prompt or of a response
    end = 0

    def append(tokens: Tensor, first_position: int, seen: Tensor) -> Tensor:
        nonlocal end
        own = torch.arange(end, end + len(tokens))
        ids.append(tokens)
        positions.append(torch.arange(first_position, first_position + len(tokens)))
        if len(tokens):
            sequence_parts.append((own, torch.cat([seen, own])))
        end += len(tokens)
        return own

    nothing = torch.zeros(0, dtype=torch.int64)
    for row in rows:
        prompt, response = sequences.prompt(row), sequences.response(row)
        start = starts.get(prompt.numpy().tobytes())
        if start is None:
            start = starts[prompt.numpy().tobytes()] = end
            append(prompt, 0, nothing)
        prompt_at = torch.arange(start, start + len(prompt))
        own = append(response[:-1], len(prompt), prompt_at)
        predict_at.append(torch.cat([prompt_at[-1:], own]))
        targets.append(response)
    append(torch.zeros(-end % multiple if end else multiple, dtype=torch.int64), 0, nothing)
    all_positions = torch.cat(positions)
    return SharedPacking(
        input_ids=torch.cat(ids),
        position_ids=all_positions,
        params=_params(sequence_parts, int(all_positions.max()) + 1),
        predict_at=torch.cat(predict_at or [nothing]),
        targets=torch.cat(targets or [nothing]),
    )


def _params(parts: list[tuple[Tensor, Tensor]], longest: int) -> SharedPromptParams:
    blocks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for queries, keys in parts:
        blocks.setdefault((len(queries), len(keys)), []).append((queries, keys))
    ordered = [part for members in blocks.values() for part in members]
    return SharedPromptParams(
        qkv_format="sbhd",  # Megatron then rotates by the angles it is given, token by token
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        query_order=torch.cat([queries for queries, _ in ordered]),
        key_order=torch.cat([keys for _, keys in ordered]),
        blocks=tuple((len(members), *shape) for shape, members in blocks.items()),
    )
