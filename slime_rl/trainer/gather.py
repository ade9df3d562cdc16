"""The whole global batch on every worker: small fields gathered over data parallelism, in the order of sample_ids.

    this worker's rows ──► gather over dp ──► sort by sample_ids ──► advantages, token weights (same everywhere)
                                                                  ──► this worker's tokens back in its own order

Advantages and denominators are computed on it before any split, so they cannot depend on how work is spread.
Letters: N, T samples and response tokens of the global batch; n, t of this worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_rl.algorithms.advantages.returns import gae_returns
from slime_rl.algorithms.aggregation import token_weights
from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.algorithms.policy_losses.covariance import select_by_covariance
from slime_rl.config import Config
from slime_rl.protocols import AdvantageFunction
from slime_rl.registry import own_code
from slime_rl.trainer.distributed import Axis, gather_ragged
from slime_rl.trainer.shard import Shard

INTEGERS = ("sample_ids", "group_ids", "rollout_ids", "update_ids", "response_lengths", "total_lengths")


@dataclass(frozen=True)
class GlobalBatch:
    """Fields of the global batch, and which of its tokens are this worker's."""

    integers: dict[str, Tensor]  # [N] int64 each, see INTEGERS
    samples: dict[str, Tensor]  # [N] float32 each: rewards, and baseline_rewards where given
    tokens: dict[str, Tensor]  # [T] float32 each: mask, rollout_log_probs; where needed old/ref_log_probs, values
    own_tokens: Tensor  # [t] int64: this worker's response tokens, in its order

    @property
    def sample_of_token(self) -> Tensor:  # [T] int64
        lengths = self.integers["response_lengths"]
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    def advantages(self, config: Config, estimator: AdvantageFunction) -> Tensor:
        """`[T]` float32.

        Raises:
            ValueError: the estimator returned something else than one number per token.
        """
        batch = self._advantage_batch()
        name = config.algorithm.advantage_estimator
        is_own = ":" in name
        with own_code(f"--advantage-estimator {name}", explained=() if is_own else (Exception,)):
            result = estimator(config, batch.copy() if is_own else batch)  # one's own may change what it gets
        wanted = tuple(batch.mask.shape)
        if not isinstance(result, Tensor) or tuple(result.shape) != wanted or result.is_complex():
            got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"--advantage-estimator {name}: must return a tensor of real numbers {wanted}, got {got}")
        return result.float()

    def returns(self, config: Config) -> Tensor:
        """What the critic learns, `[T]` float32; needs `values` among the tokens."""
        return gae_returns(config, self._advantage_batch())

    def _advantage_batch(self) -> AdvantageBatch:
        return AdvantageBatch(
            rewards=self.samples["rewards"],
            group_ids=self.integers["group_ids"],
            rollout_ids=self.integers["rollout_ids"],
            lengths=self.integers["response_lengths"],
            mask=self.tokens["mask"],
            old_log_probs=self.tokens.get("old_log_probs"),
            rollout_log_probs=self.tokens["rollout_log_probs"],
            ref_log_probs=self.tokens.get("ref_log_probs"),
            values=self.tokens.get("values"),
            baseline_rewards=self.samples.get("baseline_rewards"),
        )

    def per_update(self, config: Config, advantages: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(token weights `[T]`, covariance choice `[T]` or None): counted on every optimizer update as a whole."""
        mask, sample = self.tokens["mask"], self.sample_of_token
        weights, chosen = torch.zeros_like(mask), torch.zeros_like(mask, dtype=torch.bool)
        selects = False
        for update in self.integers["update_ids"].unique().tolist():
            rows = self.integers["update_ids"] == update
            here = rows[sample]
            numbers = rows.cumsum(0) - 1  # position of a sample among those of the update
            weights[here] = token_weights(
                config,
                mask=mask[here],
                sample_ids=numbers[sample[here]],
                rollout_ids=self.integers["rollout_ids"][rows],
                group_ids=self.integers["group_ids"][rows],
            )
            old = self.tokens.get("old_log_probs")
            if advantages is not None and old is not None:
                picks = select_by_covariance(
                    config, old_log_probs=old[here], advantages=advantages[here], mask=mask[here]
                )
                if picks is not None:
                    chosen[here], selects = picks, True
        return weights, chosen if selects else None


def gather_global(shard: Shard, token_fields: dict[str, Tensor], num_samples: int, dp: Axis) -> GlobalBatch:
    """The global batch from every worker's shard; `token_fields` are `[t]` float32. Collective over dp.

    Raises:
        ValueError: the workers' sample_ids are not 0..num_samples-1, each once.
    """
    names, fields = list(token_fields), list(token_fields.values())
    integers = torch.cat(gather_ragged(torch.stack([getattr(shard, name) for name in INTEGERS], 1), dp))
    samples = torch.cat(gather_ragged(torch.stack(list(shard.sample_fields.values()), 1), dp))
    tokens = torch.cat(gather_ragged(torch.stack(fields, 1), dp))
    ids = integers[:, 0]
    order = ids.argsort()
    if not torch.equal(ids[order], torch.arange(num_samples, device=ids.device)):
        raise ValueError(
            f"sample_ids of the workers must be 0..{num_samples - 1}, each once, got {ids[order].tolist()[:8]}…"
        )
    lengths = integers[:, INTEGERS.index("response_lengths")]
    tokens = tokens[_token_order(lengths, order)]
    integers, samples = integers[order], samples[order]
    own = _token_order(integers[:, INTEGERS.index("response_lengths")], shard.sample_ids)
    return GlobalBatch(
        integers={name: integers[:, i] for i, name in enumerate(INTEGERS)},
        samples={name: samples[:, i] for i, name in enumerate(shard.sample_fields)},
        tokens={name: tokens[:, i] for i, name in enumerate(names)},
        own_tokens=own,
    )


def _token_order(lengths: Tensor, rows: Tensor) -> Tensor:
    """Positions of the tokens of `rows`, one row after the other, among tokens of rows of `lengths`."""
    starts = lengths.cumsum(0) - lengths
    picked = lengths[rows]
    begins = picked.cumsum(0) - picked
    within = torch.arange(int(picked.sum()), device=lengths.device) - begins.repeat_interleave(picked)
    return starts[rows].repeat_interleave(picked) + within
