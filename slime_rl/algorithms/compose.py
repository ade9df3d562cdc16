"""The whole loss of a token:

    batch ─► off-policy correction ─► weights, mask
               │                        │
               └─► policy loss * weights ─► + kl_loss_coef * KL(policy, reference) - entropy_coef * entropy

Aggregation follows in the trainer: loss = sum over t of token_weights_t * loss_t.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch, LossOutput
from slime_rl.algorithms.kl import kl_tokens
from slime_rl.algorithms.off_policy import kept_by_rules
from slime_rl.config import Config
from slime_rl.protocols import OffPolicyFunction, PolicyLossFunction
from slime_rl.registry import own_code


def compose_loss(
    config: Config, batch: LossBatch, loss_fn: PolicyLossFunction, off_policy_fn: OffPolicyFunction | None
) -> LossOutput:
    """Loss per token `[T]` of one micro-batch, 0 on masked and on rejected tokens.

    `off_policy_fn` None leaves out correction, rejection rules and their metrics; supervised training has no engine to
    compare with. A custom `loss_fn` gets a batch whose masked entries are 0, and what it returns on them is dropped.

    Raises:
        ValueError: `--use-kl-loss` without `ref_log_probs`, or a shape that does not fit.
    """
    batch = batch.cleaned()
    mask, weights, metrics = batch.mask, torch.ones_like(batch.mask), {}
    if off_policy_fn is not None:
        with _of_user("--off-policy-correction", config.algorithm.off_policy_correction):
            correction = off_policy_fn(config, batch)
        mask = torch.where(kept_by_rules(config, batch), correction.mask, 0.0)
        weights = _kept(correction.weights.detach(), mask)
        rejected = ((batch.mask > 0) & (mask <= 0)).to(batch.mask.dtype)
        metrics = {**correction.metrics, "off_policy/rejected": rejected}
    batch = batch.with_mask(mask).cleaned()
    with _of_user("--policy-loss", config.algorithm.policy_loss):
        policy = loss_fn(config, batch)
    if policy.loss.shape != mask.shape:
        raise ValueError(
            f"--policy-loss {config.algorithm.policy_loss}: must return one loss per token, shape {tuple(mask.shape)}, "
            f"got {tuple(policy.loss.shape)}"
        )
    pg_loss = _kept(policy.loss, mask) * weights
    metrics |= {k: _kept(v, mask) for k, v in policy.metrics.items()}
    metrics |= {"pg_loss": pg_loss.detach(), "entropy": batch.entropy.detach()}
    loss = pg_loss - config.algorithm.entropy_coef * batch.entropy if config.algorithm.entropy_coef else pg_loss
    if config.algorithm.use_kl_loss:
        kl = kl_tokens(config.algorithm.kl_loss_type, batch.log_probs, batch.need("ref_log_probs", "--use-kl-loss"))
        loss = loss + config.algorithm.kl_loss_coef * kl
        metrics["kl_loss"] = kl.detach()
    return LossOutput(loss=loss, metrics={**metrics, "loss": loss.detach()})


def _of_user(flag: str, name: str) -> AbstractContextManager[None]:
    return own_code(f"{flag} {name}", explained=() if ":" in name else (Exception,))


def _kept(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, x, 0.0)
