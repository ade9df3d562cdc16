"""Log-probability and entropy of response tokens straight from hidden states, without ever holding all logits.

Letters: K response tokens, H hidden size, V vocabulary (without padding), Vp its part on this tensor-parallel worker.
Logits `[t, v]` exist for one tile of tokens and vocabulary rows at a time: sums over the vocabulary are taken tile by
tile under a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867). The backward pass computes logits again,
unless there are so few that they were kept, and writes the gradient from its closed form:

    z = h·Wᵀ / temperature,  p = softmax(z),  ent = -Σ p log p
    ∂logp_y/∂z_j = [j = y] - p_j            ∂ent/∂z_j = -p_j (log p_j + ent)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Float32 logits of a tile: on a CPU they stay in the cache, on a GPU products and kernels are large.
CPU_TILE_BYTES, CPU_TILE_ROWS = 4 * 1024 * 1024, 2048
GPU_TILE_BYTES = 64 * 1024 * 1024  # each token with the whole vocabulary
KEPT_BYTES = 256 * 1024 * 1024  # most logits of a micro-batch that the backward pass is saved from computing again
_LOWEST = -1e30  # below every logit; its differences are finite


@dataclass(frozen=True)
class HeadSpec:
    """How the vocabulary is spread, and the temperature that the engine sampled with."""

    group: Any  # tensor-parallel process group
    tp_size: int
    first_token: int  # id of this worker's first vocabulary row
    num_tokens: int  # its rows that are real tokens; padding rows come after them
    temperature: float
    tile: tuple[int, int]  # tokens, vocabulary rows
    kept_bytes: int = KEPT_BYTES

    def tiles(self, length: int) -> Iterator[slice]:
        """`length` tokens, a tile's number of them at a time."""
        return _slices(length, self.tile[0])

    def row_tiles(self) -> Iterator[slice]:
        """This worker's rows, a tile's number of them at a time."""
        return _slices(self.num_tokens, self.tile[1])


def head_spec(group: Any, rank: int, size: int, vocab_size: int, temperature: float, on_gpu: bool = False) -> HeadSpec:
    """The spec of worker `rank` of `size`, whose vocabulary is padded to a multiple of `size`."""
    rows = -(-vocab_size // size)
    first = rank * rows
    own = max(0, min(rows, vocab_size - first))
    tile_rows = max(1, own if on_gpu else min(own, CPU_TILE_ROWS))
    tile_tokens = max(1, (GPU_TILE_BYTES if on_gpu else CPU_TILE_BYTES) // (4 * tile_rows))
    return HeadSpec(group, size, first, own, temperature, (tile_tokens, tile_rows))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def log_probs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec) -> tuple[Tensor, Tensor]:
    """`hidden [K, H]`, `weight [padded Vp, H]`, `targets [K]` int64 -> log-probs and entropy, both `[K]` float32.

    Differentiable in hidden and weight. The gradient of `hidden` is this worker's part: the caller sums it over the
    tensor-parallel group.
    """
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keeps_logits = has_backward and 4 * len(hidden) * spec.num_tokens <= spec.kept_bytes
    log_probs, entropy = _Head.apply(hidden, weight, targets, spec, keeps_logits)
    return log_probs, entropy


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec, keeps_logits: bool
    ) -> tuple[Tensor, Tensor]:
        stats = hidden.new_empty(3, len(hidden), dtype=torch.float32)  # log-prob, entropy, log-normaliser
        work = _Workspace(hidden, spec)
        kept: list[Tensor] | None = [] if keeps_logits else None
        for part in spec.tiles(len(hidden)):
            stats[:, part] = _statistics(hidden[part], weight, targets[part], spec, work, kept)
        ctx.logits, ctx.spec = kept, spec
        ctx.save_for_backward(hidden, weight, targets, stats)
        ctx.set_materialize_grads(False)
        return stats[0].clone(), stats[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, (_, entropy, log_norm) = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        work = _Workspace(hidden, spec)
        kept = None if ctx.logits is None else iter(ctx.logits)
        for part in spec.tiles(len(hidden)):
            of_log_probs, of_entropy = (None if g is None else g[part, None] for g in grads)
            for rows in spec.row_tiles():
                logits = work.logits(hidden[part], weight[rows]) if kept is None else next(kept)
                log_p = logits.sub_(log_norm[part, None])
                grad = _grad_logits(log_p, entropy[part, None], of_log_probs, of_entropy, work)
                if of_log_probs is not None:
                    place, is_here = _local(targets[part], spec, rows)
                    grad.scatter_add_(-1, place[:, None], of_log_probs * is_here[:, None])
                grad = grad.div_(spec.temperature).to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[part], grad, weight[rows])
                if grad_weight is not None:
                    _add_product(grad_weight[rows], grad.T, hidden[part])
        ctx.logits = None
        back = [None if g is None else g.to(x.dtype) for g, x in ((grad_hidden, hidden), (grad_weight, weight))]
        return back[0], back[1], None, None, None


class _Workspace:
    """Two tiles of float32 that are used again and again: fresh memory costs a CPU more than what is done in it."""

    def __init__(self, hidden: Tensor, spec: HeadSpec) -> None:
        tokens, rows = min(len(hidden), spec.tile[0]), min(spec.num_tokens, spec.tile[1])
        self._tiles = hidden.new_empty(2, tokens * rows, dtype=torch.float32)
        self._temperature = spec.temperature

    def tile(self, which: int, shape: torch.Size | tuple[int, int]) -> Tensor:
        return self._tiles[which, : shape[0] * shape[1]].view(shape)

    def logits(self, hidden: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits over the temperature, `[t, v]` float32: in tile 0, or in `out`."""
        out = self.tile(0, (len(hidden), len(rows))) if out is None else out
        if hidden.dtype == torch.float32 == rows.dtype:
            torch.mm(hidden, rows.T, out=out)
        else:
            out.copy_(hidden @ rows.T)
        return out if self._temperature == 1.0 else out.div_(self._temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`; where all are float32 the product is added as it is computed."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec, work: _Workspace, kept: list[Tensor] | None
) -> Tensor:
    """`[3, t]`: log-prob of the target, entropy, log of the normaliser; over the whole vocabulary."""
    highest = hidden.new_full((len(hidden),), _LOWEST, dtype=torch.float32)
    total, weighted, target_logit = torch.zeros_like(highest).expand(3, -1)  # Σ e^(z-m), Σ e^(z-m) (z-m), z_y
    for rows in spec.row_tiles():
        if kept is None:
            logits = work.logits(hidden, weight[rows])
        else:
            shape = (len(hidden), rows.stop - rows.start)
            logits = work.logits(hidden, weight[rows], hidden.new_empty(shape, dtype=torch.float32))
            kept.append(logits)
        place, is_here = _local(targets, spec, rows)
        target_logit = target_logit + logits.gather(-1, place[:, None])[:, 0] * is_here
        top = torch.maximum(highest, logits.amax(-1))
        total, weighted = _under(top, highest, total, weighted)
        shifted = torch.sub(logits, top[:, None], out=work.tile(0, logits.shape))
        weights = torch.exp(shifted, out=work.tile(1, logits.shape))
        total = total + weights.sum(-1)
        weighted = weighted + weights.mul_(shifted).sum(-1)
        highest = top
    if spec.tp_size > 1:
        top = highest.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=spec.group)
        sums = torch.stack([*_under(top, highest, total, weighted), target_logit])
        dist.all_reduce(sums, group=spec.group)
        highest, (total, weighted, target_logit) = top, sums
    log_total = total.log()
    return torch.stack([target_logit - highest - log_total, log_total - weighted / total, highest + log_total])


def _under(top: Tensor, highest: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums of `_statistics` under another maximum."""
    shift = highest - top
    scale = shift.exp()
    return total * scale, (weighted + total * shift) * scale


def _grad_logits(
    log_p: Tensor, entropy: Tensor, of_log_probs: Tensor | None, of_entropy: Tensor | None, work: _Workspace
) -> Tensor:
    """Gradient of the undivided logits `[t, v]` float32, without that of the target's; overwrites `log_p`."""
    p = torch.exp(log_p, out=work.tile(1, log_p.shape))
    if of_entropy is None:
        return p.mul_(-of_log_probs) if of_log_probs is not None else p.zero_()
    factor = log_p.add_(entropy).mul_(of_entropy)
    if of_log_probs is not None:
        factor.add_(of_log_probs)
    return p.mul_(factor.neg_())


def _local(targets: Tensor, spec: HeadSpec, rows: slice) -> tuple[Tensor, Tensor]:
    """Place of each target among this worker's `rows` (clamped), and 1.0 where it really is there."""
    place, count = targets - spec.first_token - rows.start, rows.stop - rows.start
    return place.clamp(0, count - 1), ((place >= 0) & (place < count)).float()
