"""The whole loss of a token:

    batch ─► off-policy correction ─► weights, mask
               │                        │
               └─► policy loss * weights ─► + kl_loss_coef * KL(policy, reference) - entropy_coef * entropy

Aggregation follows in the trainer: loss = sum over t of token_weights_t * loss_t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime_rl.algorithms.batch import LossBatch, LossOutput, OffPolicyOutput
from slime_rl.algorithms.kl import kl_tokens
from slime_rl.algorithms.metrics import RESERVED, is_maximum
from slime_rl.algorithms.off_policy import kept_by_rules
from slime_rl.config import Config
from slime_rl.protocols import OffPolicyFunction, PolicyLossFunction
from slime_rl.registry import own_code

Output = TypeVar("Output", LossOutput, OffPolicyOutput)


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
        name = config.algorithm.off_policy_correction
        correction = _called("--off-policy-correction", name, off_policy_fn, config, batch, OffPolicyOutput)
        mask = torch.where(kept_by_rules(config, batch), correction.mask, 0.0)
        weights = _kept(correction.weights.detach(), mask)
        rejected = ((batch.mask > 0) & (mask <= 0)).to(batch.mask.dtype)
        metrics = {**correction.metrics, "off_policy/rejected": rejected}
    batch = batch.with_mask(mask).cleaned()
    policy = _called("--policy-loss", config.algorithm.policy_loss, loss_fn, config, batch, LossOutput)
    if batch.log_probs.requires_grad and not policy.loss.requires_grad and bool((mask > 0).any()):
        raise ValueError(
            f"--policy-loss {config.algorithm.policy_loss}: the loss has no gradient, so nothing would be trained; "
            "make it from log_probs or entropy without detach()"
        )
    pg_loss = _kept(policy.loss, mask) * weights
    metrics |= {k: _kept(v, mask, -torch.inf if is_maximum(k) else 0.0) for k, v in policy.metrics.items()}
    metrics |= {"pg_loss": pg_loss.detach(), "entropy": batch.entropy.detach()}
    loss = pg_loss - config.algorithm.entropy_coef * batch.entropy if config.algorithm.entropy_coef else pg_loss
    if config.algorithm.use_kl_loss:
        kl = kl_tokens(config.algorithm.kl_loss_type, batch.log_probs, batch.need("ref_log_probs", "--use-kl-loss"))
        loss = loss + config.algorithm.kl_loss_coef * kl
        metrics["kl_loss"] = kl.detach()
    return LossOutput(loss=loss, metrics={**metrics, "loss": loss.detach()})


def _called(
    flag: str,
    name: str,
    function: Callable[[Config, LossBatch], Any],
    config: Config,
    batch: LossBatch,
    kind: type[Output],
) -> Output:
    """What the function returns. One of the user's own gets a batch that it may change, and its answer is checked.

    Raises:
        ValueError: with the flag: it raised, or returned another type, or something else than one number per token.
    """
    if ":" not in name:
        return function(config, batch)  # type: ignore[return-value]
    with own_code(f"{flag} {name}"):
        output = function(config, batch.copy())
    if not isinstance(output, kind):
        raise ValueError(f"{flag} {name}: must return a {kind.__name__}, got {type(output).__name__}")
    numbers = {name: getattr(output, name) for name in ("loss", "weights", "mask") if hasattr(output, name)}
    if not isinstance(output.metrics, dict):
        raise ValueError(f"{flag} {name}: metrics must be a dict, got {type(output.metrics).__name__}")
    if taken := sorted(RESERVED & output.metrics.keys()):
        raise ValueError(f"{flag} {name}: a metric must not be called {taken[0]}, which is the name of one of ours")
    for field, value in {**output.metrics, **numbers}.items():
        if not isinstance(value, Tensor) or value.shape != batch.mask.shape or value.is_complex():
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{flag} {name}: {field} must be one real number per token, {tuple(batch.mask.shape)}, got {got}"
            )
    for field in numbers.keys() - {"loss"}:  # a loss that is not finite ends the step with a dump
        if not bool(torch.isfinite(numbers[field][batch.mask > 0]).all()):
            raise ValueError(f"{flag} {name}: {field} must be finite on tokens that are trained on")
    return output


def _kept(x: Tensor, mask: Tensor, otherwise: float = 0.0) -> Tensor:
    return torch.where(mask > 0, x, otherwise)
