"""Advantages from rewards over time: each token is judged by what comes after it.

Time counts trainable tokens only: tool text between two model turns takes no discount, has no value and no reward.
r_t is the token reward (reward on the last trainable token, KL on each), G_t = r_t + gamma * G_{t+1} the return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.advantages.episodes import token_rewards
from slime_rl.algorithms.advantages.whitening import finish
from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.config import Config


def reinforce(config: Config, batch: AdvantageBatch) -> Tensor:
    """G_t; Williams, "Simple statistical gradient-following algorithms", 1992."""
    return finish(config, batch, _returns(config, batch))


def reinforce_plus_plus(config: Config, batch: AdvantageBatch) -> Tensor:
    """G_t whitened over all trainable tokens of the batch; REINFORCE++, arXiv 2501.03262."""
    return finish(config, batch, _returns(config, batch), always_whiten=True)


def remax(config: Config, batch: AdvantageBatch) -> Tensor:
    """G_t - reward of the greedy response to the same prompt; ReMax, arXiv 2310.10505.

    Raises:
        ValueError: the batch has no `baseline_rewards`.
    """
    if batch.baseline_rewards is None:
        raise ValueError("--advantage-estimator remax needs baseline_rewards, but the batch has none")
    return finish(config, batch, _returns(config, batch) - batch.baseline_rewards.double()[batch.sample_ids])


def gae(config: Config, batch: AdvantageBatch) -> Tensor:
    """sum over l of (gamma * lambda)^l * delta_{t+l}, delta_t = r_t + gamma * V_{t+1} - V_t; arXiv 1506.02438.

    V after the last trainable token is 0. The critic's targets are `gae_returns`.
    """
    return finish(config, batch, _gae(config, batch)[0])


def gae_returns(config: Config, batch: AdvantageBatch) -> Tensor:
    """What the critic learns: advantage (before any whitening) + V; `[T]` float32, 0 on masked tokens."""
    advantages, values = _gae(config, batch)
    return (advantages + values).float()


def _gae(config: Config, batch: AdvantageBatch) -> tuple[Tensor, Tensor]:
    """(advantages, values), `[T]` float64, both 0 on masked tokens."""
    if batch.values is None:
        raise ValueError("--advantage-estimator gae needs values of a critic, but the batch has none")
    keep, algorithm = batch.mask > 0, config.algorithm
    values, ids = batch.values[keep].double(), batch.sample_ids[keep]
    following = torch.zeros_like(values)
    following[:-1] = torch.where(ids[1:] == ids[:-1], values[1:], 0.0)
    delta = token_rewards(config, batch)[keep] + algorithm.gamma * following - values
    advantages = discounted_sum(delta, ids, algorithm.gamma * algorithm.lambd)
    return _spread(advantages, keep), _spread(values, keep)


def _returns(config: Config, batch: AdvantageBatch) -> Tensor:
    """Discounted returns `[T]` float64, 0 on masked tokens."""
    keep = batch.mask > 0
    rewards = token_rewards(config, batch)[keep]
    return _spread(discounted_sum(rewards, batch.sample_ids[keep], config.algorithm.gamma), keep)


def discounted_sum(x: Tensor, ids: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each run of equal `ids`; all `[M]`.

    By doubling: after step k, y_t holds the first 2^k terms, so it takes log2(longest run) tensor operations instead of
    a Python loop over tokens.
    """
    y, step = x.clone(), 1
    while step < len(y):
        same = ids[:-step] == ids[step:]
        if not bool(same.any()):
            break
        ahead = torch.where(same, y[step:], 0.0) * discount**step
        y = torch.cat([y[:-step] + ahead, y[-step:]])
        step *= 2
    return y


def _spread(x: Tensor, keep: Tensor) -> Tensor:
    """`x [M]` of the kept tokens back on `[T]`, 0 elsewhere."""
    return torch.zeros(keep.shape, dtype=x.dtype, device=x.device).masked_scatter(keep, x)
