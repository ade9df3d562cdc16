"""Rewards as the estimators see them: with penalties and KL taken off, per episode or per token.

rewards [N] + overlong penalty ─┬─► Episodes: one reward per rollout_id, KL summed       (group estimators)
KL per token * kl_coef ─────────┴─► token_rewards [T]: KL on each token, reward on the last (returns, GAE)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_rl.algorithms.batch import AdvantageBatch, segment_sum
from slime_rl.algorithms.kl import kl_tokens
from slime_rl.algorithms.overlong import overlong_penalty
from slime_rl.config import Config


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """One entry per rollout_id. E episodes, G groups.

    An episode that was cut into several samples is one draw of the policy: it counts once in its group, with the mean
    of its samples' rewards and all of its tokens.
    """

    rewards: Tensor  # [E] float64
    num_tokens: Tensor  # [E] float64, trainable ones
    groups: Tensor  # [E] int64, 0..G-1
    of_token: Tensor  # [T] int64, episode of each token
    num_groups: int

    def group_sum(self, x: Tensor) -> Tensor:
        """Sum of `x [E]` over the episodes of each group -> `[G]`."""
        return segment_sum(x, self.groups, self.num_groups)

    @property
    def group_sizes(self) -> Tensor:  # [G] float64
        return self.group_sum(torch.ones_like(self.rewards))

    @property
    def from_group_min(self) -> Tensor:
        """`[E]` rewards minus the lowest of the group: exactly 0 everywhere in a group of equal rewards.

        Group statistics do not change under a common shift, and with this one seven rewards of 0.1 have mean and
        deviation 0 to the last bit.
        """
        lowest = torch.full((self.num_groups,), torch.inf, dtype=torch.float64, device=self.rewards.device)
        lowest = lowest.scatter_reduce(0, self.groups, self.rewards, "amin")
        return self.rewards - lowest[self.groups]


def make_episodes(config: Config, batch: AdvantageBatch) -> Episodes:
    """The episodes of a batch, KL and overlong penalty taken off the rewards.

    Raises:
        ValueError: a reward is not finite, or samples of one rollout_id lie in different groups.
    """
    unique, of_sample = torch.unique(batch.rollout_ids, return_inverse=True)
    num = len(unique)
    groups = torch.zeros(num, dtype=torch.int64, device=of_sample.device).scatter(0, of_sample, batch.group_ids)
    if not torch.equal(groups[of_sample], batch.group_ids):
        bad = unique[of_sample[groups[of_sample] != batch.group_ids]].unique().tolist()
        raise ValueError(f"samples of one rollout_id must belong to one group; rollout_ids {bad[:8]} do not")
    rewards = sample_rewards(config, batch)
    of_token = of_sample[batch.sample_ids]
    counts = segment_sum(torch.ones_like(rewards), of_sample, num)
    kl = segment_sum(_kl_penalty(config, batch), of_token, num)
    return Episodes(
        rewards=segment_sum(rewards, of_sample, num) / counts - kl,
        num_tokens=segment_sum((batch.mask > 0).double(), of_token, num),
        groups=groups,
        of_token=of_token,
        num_groups=int(batch.group_ids.max()) + 1,
    )


def sample_rewards(config: Config, batch: AdvantageBatch) -> Tensor:
    """`[N]` float64: rewards with the overlong penalty, without KL. Raises ValueError where one is not finite."""
    if not bool(torch.isfinite(batch.rewards).all()):
        bad = torch.nonzero(~torch.isfinite(batch.rewards)).flatten().tolist()
        raise ValueError(f"rewards must be finite; samples {bad[:8]} have {[float(batch.rewards[i]) for i in bad[:8]]}")
    return batch.rewards.double() + overlong_penalty(config, batch.lengths)


def token_rewards(config: Config, batch: AdvantageBatch) -> Tensor:
    """`[T]` float64: minus the KL on every trainable token, and the sample's reward on its last trainable one.

    The reward goes to the last *trainable* token so that a response ending in tool text does not lose it.
    """
    rewards, keep, ids = sample_rewards(config, batch), batch.mask > 0, batch.sample_ids
    position = torch.arange(len(ids), device=ids.device)
    last = torch.full((len(rewards),), -1, dtype=torch.int64, device=ids.device)
    last = last.scatter_reduce(0, ids[keep], position[keep], "amax")
    given = last >= 0
    return (-_kl_penalty(config, batch)).index_add(0, last[given], rewards[given])


def _kl_penalty(config: Config, batch: AdvantageBatch) -> Tensor:
    """`[T]` float64: kl_coef times the KL to the reference on trainable tokens, 0 elsewhere."""
    coef = config.algorithm.kl_coef
    if coef == 0:
        return torch.zeros(batch.mask.shape, dtype=torch.float64, device=batch.mask.device)
    if batch.old_log_probs is None or batch.ref_log_probs is None:
        missing = "old_log_probs" if batch.old_log_probs is None else "ref_log_probs"
        raise ValueError(f"--kl-coef {coef} needs {missing}, but the batch has none")
    keep = batch.mask > 0
    old = torch.where(keep, batch.old_log_probs, 0.0).double()
    ref = torch.where(keep, batch.ref_log_probs, 0.0).double()
    return coef * kl_tokens(config.algorithm.kl_reward_type, old, ref)
