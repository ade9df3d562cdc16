"""The numbers per response token that a step needs before its first update, and who computes them.

sampled            mask, the engine's log-probs
policy_fields      old, reference and teacher log-probs: passes of the policy's workers
values             passes of the critic, which may be in other workers; then both sides get them as TokenFields
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch, TokenFields, fields_of_batch
from slime_rl.trainer.loss import needs_old_pass
from slime_rl.trainer.shard import Shard
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.timing import PhaseTimer
from slime_rl.trainer.token_pass import token_pass


def sampled_fields(config: Config, shard: Shard) -> dict[str, Tensor]:
    """What came with the samples, `[t]` float32 each."""
    fields = {"mask": shard.mask, "rollout_log_probs": shard.rollout_log_probs}
    if config.algorithm.old_log_probs == "rollout" and config.train.loss != "sft":
        fields["old_log_probs"] = shard.rollout_log_probs
    return fields


def policy_fields(state: TrainState, shard: Shard, timer: PhaseTimer) -> dict[str, Tensor]:
    """`[t]` float32 each, from whatever passes of the policy's workers the step needs."""
    fields = {}
    if needs_old_pass(state.config):
        with timer.phase("log_probs"):
            fields["old_log_probs"] = token_pass(state, shard)
    if state.reference is not None:
        with timer.phase("ref_log_probs"), state.reference.swapped_into(state.models):
            fields["ref_log_probs"] = token_pass(state, shard)
    if state.teacher is not None:
        with timer.phase("teacher_log_probs"), state.teacher.swapped_into(state.models):
            fields["teacher_log_probs"] = token_pass(state, shard)
    return fields


def pack_fields(batch: RolloutBatch, fields: dict[str, Tensor], timer: PhaseTimer, kl_coef: float) -> TokenFields:
    """`fields` on the way to other workers, with what else those need to know."""
    return TokenFields.of(batch, fields, {"kl_coef": kl_coef, "seconds": timer.seconds})


def unpack_fields(given: Sequence[TokenFields], batch: RolloutBatch, state: TrainState) -> dict[str, Tensor]:
    """`[t]` each on this worker's device, for its samples in their order."""
    return {name: value.to(state.device) for name, value in fields_of_batch(given, batch).items()}


def seconds_before(given: Sequence[TokenFields], *, of_critic: bool) -> dict[str, float]:
    """Seconds of this group's passes for `given`, as one of its workers measured them."""
    return next((part.meta_info["seconds"] for part in given if ("values" in part) == of_critic), {})


def given_kl_coef(given: Sequence[TokenFields], config: Config) -> float:
    """The coefficient that the policy's workers use in this step."""
    return next((part.meta_info["kl_coef"] for part in given if "values" not in part), config.algorithm.kl_coef)


def with_kl_coef(config: Config, coef: float) -> Config:
    """The config with the coefficient that --kl-target has moved to."""
    return config.with_sections(algorithm=replace(config.algorithm, kl_coef=coef))


def current_kl_coef(state: TrainState) -> float:
    return state.config.algorithm.kl_coef if state.adaptive_kl is None else state.adaptive_kl.coef
