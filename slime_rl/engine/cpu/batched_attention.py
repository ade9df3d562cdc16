"""Causal attention of many requests over a paged cache in few calls; plain torch.

requests of a batch ─┬─ one new token:  by length, each group padded to its longest ─► one call
                     └─ several:        groups of equal lengths                     ─► one call
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_GROWTH = 1.25  # longest to shortest in a padded group


@dataclass
class Block:
    """n requests with e new tokens each; K keys of the longest."""

    queries: Tensor  # [n, e] int64, rows of the batch's queries
    keys: Tensor  # [n, K] int64, places in the cache; beyond a request's end its first one, which is masked
    lengths: Tensor  # [n] int64, tokens of each request, the new ones included
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by width of the attention window

    @property
    def is_whole_prompts(self) -> bool:
        return self.queries.size(1) == self.keys.size(1)

    def mask(self, window: int | None) -> Tensor | None:
        """`[n, 1, e, K]` bool, True where a query may look; None where it may look at every key."""
        if window not in self.masks:
            (_, num_new), num_keys = self.queries.shape, self.keys.size(1)
            at = (self.lengths[:, None] - num_new + torch.arange(num_new))[:, None, :, None]
            key = torch.arange(num_keys)
            mask = key <= at
            if window is not None:
                mask &= key >= at - window
            self.masks[window] = None if bool(mask.all()) else mask
        return self.masks[window]


def plan(starts: list[int], num_new: list[int], lengths: list[int], places: Tensor) -> list[Block]:
    """Requests into blocks: their first query row, new tokens, all tokens, and cache places `[requests, longest]`."""
    groups: dict[tuple[int, int], list[int]] = {}
    for request, (new, length) in enumerate(zip(num_new, lengths, strict=True)):
        if new > 0:
            alike = length if new > 1 else math.ceil(math.log(length, _GROWTH))
            groups.setdefault((new, alike), []).append(request)
    blocks = []
    for (new, _), requests in groups.items():
        of = torch.tensor([lengths[request] for request in requests])
        keys = places[torch.tensor(requests), : int(of.max())].long()
        keys = torch.where(torch.arange(keys.size(1)) < of[:, None], keys, keys[:, :1])
        queries = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(new)
        blocks.append(Block(queries, keys, of))
    return blocks


def attend(
    query: Tensor, output: Tensor, key: Tensor, value: Tensor, block: Block, scaling: float, window: int | None
) -> None:
    """Causal attention of a block's queries, written into their rows of `output`.

    Shapes: query `[t, h, d]`, output `[t, h, dv]`, cache key `[slots, hk, d]` and value `[slots, hk, dv]`.
    """
    (n, num_new), heads = block.queries.shape, query.size(1)
    k, v = (_rows(x, block.keys).to(query.dtype).transpose(1, 2) for x in (key, value))
    if num_new == 1:  # the query heads that share a key head are as good as queries of one head
        q = _rows(query, block.queries[:, 0]).unflatten(1, (k.size(1), heads // k.size(1)))
        out = scaled_dot_product_attention(q, k, v, block.mask(window), scale=scaling).flatten(1, 2)[:, None]
    else:
        q = _rows(query, block.queries).transpose(1, 2)
        causal = block.is_whole_prompts and window is None
        mask = None if causal else block.mask(window)
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True)
        out = out.transpose(1, 2)
    output.index_copy_(0, block.queries.flatten(), out.reshape(n * num_new, heads, -1))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]`; indexing takes element by element what is a copy of whole rows."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)
