"""A worker's samples as packed micro-batches, cut for context parallelism.

    lengths ──► split_rows: rows of each micro-batch (equal counts on all data-parallel workers)
            ──► make_micro_batch: tokens of this context-parallel worker, and where each response token is predicted

Letters: n samples of a micro-batch, t tokens on this worker, T response tokens of the micro-batch, K those of them that
are predicted on this worker (K = T without context parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_rl.config import TrainConfig
from slime_rl.data.packing import fixed, pack
from slime_rl.trainer.distributed import Layout, reduce_max
from slime_rl.trainer.sequences import Sequences, ranges
from slime_rl.trainer.shared_prompts import pack_shared

MASKED_PAD_TOKEN = (
    0  # fills sequences up to what context and sequence parallelism need; causality hides it from the rest
)


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. An empty one (n = 0) only keeps the workers in step and adds nothing to the loss."""

    index: int
    rows: list[int]  # [n] rows of this worker's batch
    input_ids: Tensor  # [1, t] int64
    position_ids: Tensor  # [1, t] int64
    packed: PackedSeqParams
    predict_at: Tensor  # [K] int64, positions 0..t-1 whose hidden state predicts a response token
    targets: Tensor  # [K] int64, those tokens
    owned: Tensor  # [K] int64, which of the T response tokens they are
    token_index: Tensor  # [T] int64, place of each response token among all of this worker's batch
    sample_ids: Tensor  # [T] int64, 0..n-1

    @property
    def num_samples(self) -> int:
        return len(self.rows)


def token_cap(train: TrainConfig, layout: Layout, sequence_parallel: bool) -> int:
    """Most tokens of a micro-batch on one worker, before it is filled up for sequence parallelism."""
    unit = layout.tp.size if sequence_parallel else 1
    return max(1, train.max_tokens_per_worker // unit) * unit


def split_rows(
    units: list[list[int]],
    sizes: list[int],
    train: TrainConfig,
    layout: Layout,
    sequence_parallel: bool,
    hidden_size: int,
    device: torch.device,
) -> list[list[int]]:
    """Rows of each micro-batch. Collective over the data-parallel workers.

    Rows of a unit stay together; `sizes` are the units' tokens. Every worker gets the same number of micro-batches;
    where one has too few units, the rest are empty lists. The cap holds with what `padded_lengths` adds.
    """
    cap, unit = token_cap(train, layout, sequence_parallel) * layout.cp.size, _unit(layout)
    padded = [-(-size // unit) * unit for size in sizes]
    multiple = layout.pp.size if layout.vpp_size else 1  # interleaved stages take micro-batches in rounds of pp

    def cut(count: int) -> list[list[int]]:
        if not units:
            return []
        least = min(max(count, 1), len(units))
        if train.micro_batch_size is not None:
            parts = fixed(sizes, train.micro_batch_size, min_batches=least)
        else:
            parts = pack(padded, cap, min_batches=least, hidden_size=hidden_size)
        by_size = (sorted(part, key=sizes.__getitem__) for part in parts)  # attention takes neighbours of one length
        return [[row for i in part for row in units[i]] for part in by_size]

    agreed = reduce_max(max(1, len(cut(1))), layout.dp, device)
    agreed = -(-agreed // multiple) * multiple
    batches = cut(agreed)
    return batches + [[] for _ in range(agreed - len(batches))]


def padded_lengths(lengths: list[int], layout: Layout, sequence_parallel: bool) -> list[int]:
    """Lengths that context parallelism (2n chunks) and sequence parallelism (t a multiple of tp) can cut."""
    unit = _unit(layout)
    padded = [-(-length // unit) * unit for length in lengths]
    if sequence_parallel:
        while sum(padded) // layout.cp.size % layout.tp.size:
            padded[-1] += unit
    return padded


def _unit(layout: Layout) -> int:
    """What the length of every sequence must be a multiple of: context parallelism cuts it into 2n chunks."""
    return 2 * layout.cp.size if layout.cp.size > 1 else 1


def make_micro_batch(
    index: int, rows: list[int], sequences: Sequences, layout: Layout, sequence_parallel: bool, device: torch.device
) -> MicroBatch:
    """The packed micro-batch of `rows` as this worker's share of it, on `device`."""
    lengths = [sequences.lengths[row] for row in rows]
    padded = padded_lengths(lengths or [1], layout, sequence_parallel)
    ends = torch.tensor([0, *padded]).cumsum(0)
    firsts = ends[: len(rows)].numpy()
    ids = torch.full((sum(padded),), MASKED_PAD_TOKEN, dtype=torch.int64)
    ids[ranges(firsts, lengths)] = sequences.tokens[ranges([sequences.starts[row] for row in rows], lengths)]
    response_lengths = [sequences.response_length(row) for row in rows]
    prompt_lengths = np.array([sequences.prompt_lengths[row] for row in rows], dtype=np.int64)
    predict_at = torch.from_numpy(ranges(firsts + prompt_lengths - 1, response_lengths))
    positions = torch.from_numpy(ranges([0] * len(padded), padded))
    order = _local_order(padded, layout.cp.size, layout.cp.rank)
    place = torch.full((len(ids),), -1, dtype=torch.int64)
    place[order] = torch.arange(len(order))
    owned = (place[predict_at] >= 0).nonzero()[:, 0]
    cu_seqlens = ends.to(torch.int32).to(device)
    return MicroBatch(
        index=index,
        rows=rows,
        input_ids=ids[order][None].to(device),
        position_ids=positions[order][None].to(device),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
        ),
        predict_at=place[predict_at][owned].to(device),
        targets=ids[predict_at + 1][owned].to(device),
        owned=owned.to(device),
        token_index=sequences.response_index(rows).to(device),
        sample_ids=torch.arange(len(rows))
        .repeat_interleave(torch.tensor(response_lengths, dtype=torch.int64))
        .to(device),
    )


def make_shared_micro_batch(
    index: int, rows: list[int], sequences: Sequences, layout: Layout, sequence_parallel: bool
) -> MicroBatch:
    """The micro-batch of `rows` with every prompt computed once; on the CPU, without context parallelism."""
    packing = pack_shared(rows, sequences, layout.tp.size if sequence_parallel else 1)
    lengths = torch.tensor([sequences.response_length(row) for row in rows], dtype=torch.int64)
    return MicroBatch(
        index=index,
        rows=rows,
        input_ids=packing.input_ids[None],
        position_ids=packing.position_ids[None],
        packed=packing.params,
        predict_at=packing.predict_at,
        targets=packing.targets,
        owned=torch.arange(len(packing.targets)),
        token_index=sequences.response_index(rows),
        sample_ids=torch.arange(len(rows)).repeat_interleave(lengths),
    )


def _local_order(padded: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Packed positions that context-parallel worker r holds, in its order: chunks r and 2n-1-r of every sequence."""
    if cp_size == 1:
        return torch.arange(sum(padded))
    parts, start = [], 0
    for length in padded:
        chunks = torch.arange(start, start + length).chunk(2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
        start += length
    return torch.cat(parts)
