"""One training step: from a worker's share of the rollout batch to updated weights.

batch ─► shard ─┬─► token fields: old log-probs (unless the current policy is the old one), those of reference and
                │   teacher, values of the critic; computed here, or given by the workers of another group
                └─► gather the global batch ─► advantages, returns ─► token weights, per optimizer update
                                                                           │
   for every epoch and update, critic first: micro-batches ─► forward/backward ─► check ─► clip ─► optimizer ─► schedule
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slime_rl.algorithms.kl import kl_tokens
from slime_rl.algorithms.registry import ADVANTAGES
from slime_rl.data.batches import RolloutBatch, TokenFields
from slime_rl.trainer.critic import train_critic
from slime_rl.trainer.gather import GlobalBatch, gather_global
from slime_rl.trainer.loss import PolicyInputs, finish_gap, gap_parts, needs_old_pass
from slime_rl.trainer.shard import Shard, make_shard
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.timing import PhaseTimer
from slime_rl.trainer.token_fields import (
    current_kl_coef,
    policy_fields,
    sampled_fields,
    seconds_before,
    unpack_fields,
    with_kl_coef,
)
from slime_rl.trainer.token_log import close_log, open_log
from slime_rl.trainer.token_pass import token_pass
from slime_rl.trainer.update import StepData, over_updates, public_names, run_updates


def train_step(
    state: TrainState,
    step: int,
    batch: RolloutBatch,
    critic: TrainState | None = None,
    given: Sequence[TokenFields] = (),
) -> dict[str, float]:
    """Run every update of the step; the metrics are the same on every rank.

    Args:
        critic: trains here too, before the policy.
        given: values of a critic elsewhere, and the log-probs that this group has computed for it; else empty.

    Raises:
        ValueError: a batch that does not fit, or a plugin that returned something else than it must.
        NonFiniteError: a loss or gradient is NaN or infinite.
    """
    config, timer = with_kl_coef(state.config, current_kl_coef(state)), PhaseTimer(state.device, state.trace)
    data = StepData(state.config, batch, make_shard(state, batch), step)
    timer.seconds |= seconds_before(given, of_critic=False)
    state.token_log = {}
    token_fields = sampled_fields(config, data.shard)
    token_fields |= unpack_fields(given, batch, state) if given else policy_fields(state, data.shard, timer)
    if critic is not None:
        with timer.phase("values"):
            token_fields["values"] = token_pass(critic, data.shard)
    with timer.phase("advantages"):
        whole = gather_global(data.shard, token_fields, data.shard.num_samples, state.layout.dp)
        advantages = None
        if config.train.loss != "sft":
            advantages = whole.advantages(config, ADVANTAGES.load(config.algorithm.advantage_estimator))
        weights, selected = whole.per_update(config, advantages)
    metrics = {} if critic is None else train_critic(config, critic, data, whole, weights, timer)
    if step >= config.critic.critic_warmup_steps:
        inputs = _policy_inputs(data.shard, whole, weights, advantages, selected, token_fields)
        seen = open_log(config, state.layout, data.shard)
        updates = run_updates(state, data, inputs, timer, seen)
        state.token_log = close_log(config, data.shard, inputs, seen)
        metrics |= over_updates(updates)
        metrics["num_microbatches"] = sum(updates["num_microbatches"])
    metrics |= _after_step(state, step, whole)
    return _report(metrics, whole, advantages, needs_old_pass(config), timer)


def _after_step(state: TrainState, step: int, whole: GlobalBatch) -> dict[str, float]:
    """Move the KL coefficient and the reference where flags say so; metrics of the KL that is taken off rewards."""
    config, metrics = state.config, {}
    if config.algorithm.kl_coef > 0 and state.reference is not None:
        kept = whole.tokens["mask"] > 0
        old, reference = whole.tokens["old_log_probs"][kept], whole.tokens["ref_log_probs"][kept]
        kl = float(kl_tokens(config.algorithm.kl_reward_type, old, reference).mean()) if bool(kept.any()) else 0.0
        metrics = {"kl_reward": kl, "kl_coef": current_kl_coef(state)}
        if state.adaptive_kl is not None:
            state.adaptive_kl.update(kl, len(whole.integers["rollout_ids"].unique()))
    interval = config.model.ref_update_interval
    if interval is not None and state.reference is not None and (step + 1) % interval == 0:
        state.reference.refresh(state.models)
    return metrics


def _policy_inputs(
    shard: Shard,
    whole: GlobalBatch,
    weights: Tensor,
    advantages: Tensor | None,
    selected: Tensor | None,
    token_fields: dict[str, Tensor],
) -> PolicyInputs:
    own = whole.own_tokens
    return PolicyInputs(
        mask=shard.mask,
        weights=weights[own],
        rollout_log_probs=shard.rollout_log_probs,
        old_log_probs=token_fields.get("old_log_probs"),
        ref_log_probs=token_fields.get("ref_log_probs"),
        advantages=shard.mask * 0 if advantages is None else advantages[own],
        weight_versions=shard.weight_versions,
        teacher_log_probs=token_fields.get("teacher_log_probs", shard.teacher_log_probs),
        cov_selected=None if selected is None else selected[own],
        version=shard.weight_version,
    )


def _report(
    metrics: dict[str, float], whole: GlobalBatch, advantages: Tensor | None, has_old_pass: bool, timer: PhaseTimer
) -> dict[str, float]:
    """Metrics by their public names: means over the step's updates, micro-batches counted together."""
    mask = whole.tokens["mask"]
    if has_old_pass:
        gap = gap_parts(whole.tokens["old_log_probs"], whole.tokens["rollout_log_probs"], mask)
        metrics |= finish_gap({name: float(value) for name, value in gap.items()})
    tokens = float(whole.integers["total_lengths"].sum())
    metrics |= {"tokens": tokens, "trained_tokens": float((mask > 0).sum())}
    if advantages is not None:
        kept = advantages[mask > 0]
        metrics["advantages_mean"] = float(kept.mean()) if len(kept) else 0.0
        metrics["advantages_abs_mean"] = float(kept.abs().mean()) if len(kept) else 0.0
    named = public_names(metrics) | {f"timing_s/train/{name}": seconds for name, seconds in timer.seconds.items()}
    named["perf/train_tokens_per_s"] = tokens / max(1e-9, sum(timer.seconds.values()))
    return named
