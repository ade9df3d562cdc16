"""Log-probability and entropy of response tokens straight from hidden states, without ever holding all logits.

Letters: K response tokens, H hidden size, V vocabulary (without padding), Vp its part on this tensor-parallel worker.
Logits `[chunk, Vp]` exist for one chunk of tokens at a time and are computed again in the backward pass, which writes
the gradient from its closed form:

    z = h·Wᵀ / temperature,  p = softmax(z),  ent = -Σ p log p
    ∂logp_y/∂z_j = [j = y] - p_j            ∂ent/∂z_j = -p_j (log p_j + ent)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Most bytes of float32 logits of one chunk; a few such buffers are alive at once.
CHUNK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class HeadSpec:
    """How the vocabulary is spread, and the temperature that the engine sampled with."""

    group: Any  # tensor-parallel process group
    tp_size: int
    first_token: int  # id of this worker's first vocabulary row
    num_tokens: int  # its rows that are real tokens; padding rows come after them
    temperature: float
    chunk_bytes: int = CHUNK_BYTES

    @property
    def chunk(self) -> int:
        return max(1, self.chunk_bytes // (4 * max(1, self.num_tokens)))


def head_spec(group: Any, rank: int, size: int, vocab_size: int, temperature: float) -> HeadSpec:
    """The spec of worker `rank` of `size`, whose vocabulary is padded to a multiple of `size`."""
    rows = -(-vocab_size // size)
    first = rank * rows
    return HeadSpec(group, size, first, max(0, min(rows, vocab_size - first)), temperature)


def log_probs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec) -> tuple[Tensor, Tensor]:
    """`hidden [K, H]`, `weight [padded Vp, H]`, `targets [K]` int64 -> log-probs and entropy, both `[K]` float32.

    Differentiable in hidden and weight. The gradient of `hidden` is this worker's part: the caller sums it over the
    tensor-parallel group.
    """
    log_probs, entropy = _Head.apply(hidden, weight, targets, spec)
    return log_probs, entropy


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec) -> tuple[Tensor, Tensor]:
        stats = hidden.new_empty(3, len(hidden), dtype=torch.float32)  # log-prob, entropy, log-normaliser
        shifted = None
        for start in range(0, len(hidden), spec.chunk):
            part = slice(start, start + spec.chunk)
            shifted = _logits(hidden[part], weight, spec)
            stats[:, part] = _statistics(shifted, targets[part], spec)
        # With a single chunk nothing is saved by computing the logits twice.
        ctx.logits = shifted if len(hidden) <= spec.chunk else None
        ctx.spec = spec
        ctx.save_for_backward(hidden, weight, targets, stats)
        ctx.set_materialize_grads(False)
        return stats[0].clone(), stats[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, targets, (_, entropy, log_norm) = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows = weight[: spec.num_tokens]
        for start in range(0, len(hidden), spec.chunk):
            part = slice(start, start + spec.chunk)
            logits = ctx.logits if ctx.logits is not None else _logits(hidden[part], weight, spec)
            log_p = logits.sub_(log_norm[part, None])
            grad = _grad_logits(log_p, targets[part], entropy[part], grad_log_probs, grad_entropy, part, spec)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, rows, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight[: spec.num_tokens], grad.T, hidden[part])
        ctx.logits = None
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`; where all are float32 the product is added as it is computed."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _logits(hidden: Tensor, weight: Tensor, spec: HeadSpec) -> Tensor:
    """Logits over the temperature, `[chunk, Vp]` float32."""
    logits = (hidden @ weight[: spec.num_tokens].T).float()
    return logits if spec.temperature == 1.0 else logits.div_(spec.temperature)


def _statistics(logits: Tensor, targets: Tensor, spec: HeadSpec) -> Tensor:
    """`[3, chunk]`: log-prob of the target, entropy, log of the normaliser; over the whole vocabulary."""
    highest = logits.amax(-1) if spec.num_tokens else logits.new_full((len(logits),), -torch.inf)
    if spec.tp_size > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=spec.group)
    shifted = logits - highest[:, None]
    weights = shifted.exp()
    local, mine = _local_targets(targets, spec)
    target_logit = shifted.gather(-1, local[:, None])[:, 0] * mine if spec.num_tokens else highest * 0
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), target_logit])
    if spec.tp_size > 1:
        dist.all_reduce(sums, group=spec.group)
    total, weighted, target_logit = sums
    log_total = total.log()
    return torch.stack([target_logit - log_total, log_total - weighted / total, highest + log_total])


def _grad_logits(
    log_p: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    part: slice,
    spec: HeadSpec,
) -> Tensor:
    """Gradient of the undivided logits `[chunk, Vp]` float32."""
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if grad_log_probs is not None:
        g = grad_log_probs[part]
        grad.sub_(p * g[:, None])
        local, mine = _local_targets(targets, spec)
        if spec.num_tokens:
            grad.scatter_add_(-1, local[:, None], (g * mine)[:, None])
    if grad_entropy is not None:
        grad.sub_(p.mul_(log_p.add_(entropy[:, None])).mul_(grad_entropy[part, None]))
    return grad.div_(spec.temperature)


def _local_targets(targets: Tensor, spec: HeadSpec) -> tuple[Tensor, Tensor]:
    """Row of each target on this worker (clamped), and 1.0 where it really is here."""
    local = targets - spec.first_token
    mine = (local >= 0) & (local < spec.num_tokens)
    return local.clamp(0, max(0, spec.num_tokens - 1)), mine.float()
