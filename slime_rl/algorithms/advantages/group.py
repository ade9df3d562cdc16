"""Advantages from comparing the episodes of one prompt. Every token of an episode gets the episode's advantage.

r is an episode's reward (penalties and KL taken off), mu and sigma its group's mean and unbiased standard deviation, n
the group's episodes. Groups may differ in size; a group of one, or of equal rewards, has advantage exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.advantages.episodes import Episodes, make_episodes
from slime_rl.algorithms.advantages.whitening import finish
from slime_rl.algorithms.batch import AdvantageBatch
from slime_rl.config import Config

STD_EPS = 1e-6


def grpo(config: Config, batch: AdvantageBatch) -> Tensor:
    """(r - mu) / (sigma + 1e-6); DeepSeekMath, arXiv 2402.03300.

    `--no-grpo-std-normalization` gives r - mu: Dr. GRPO, arXiv 2503.20783.
    """
    episodes = make_episodes(config, batch)
    centred, std = _centre(episodes)
    if config.algorithm.grpo_std_normalization:
        centred = centred / (std + STD_EPS)[episodes.groups]
    return finish(config, batch, centred[episodes.of_token])


def grpo_passk(config: Config, batch: AdvantageBatch) -> Tensor:
    """r_1 - r_2 for the best episode of a group (the two highest rewards), 0 for the others; arXiv 2503.19595.

    Divided by sigma + 1e-6 unless `--no-grpo-std-normalization`. When two share the highest reward it is 0.
    """
    episodes = make_episodes(config, batch)
    shifted, groups = episodes.from_group_min, episodes.groups
    best = _group_max(episodes, shifted)
    is_best = shifted == best[groups]
    unique = episodes.group_sum(is_best.double()) == 1
    second = _group_max(episodes, torch.where(is_best & unique[groups], 0.0, shifted))
    gap = torch.where(unique & (episodes.group_sizes > 1), best - second, 0.0)
    if config.algorithm.grpo_std_normalization:
        gap = gap / (_centre(episodes)[1] + STD_EPS)
    return finish(config, batch, torch.where(is_best, gap[groups], 0.0)[episodes.of_token])


def rloo(config: Config, batch: AdvantageBatch) -> Tensor:
    """r - mean of the others = n / (n - 1) * (r - mu); Ahmadian et al., arXiv 2402.14740."""
    episodes = make_episodes(config, batch)
    sizes = episodes.group_sizes
    advantages = _centre(episodes)[0] * (sizes / (sizes - 1).clamp(min=1))[episodes.groups]
    return finish(config, batch, advantages[episodes.of_token])


def opo(config: Config, batch: AdvantageBatch) -> Tensor:
    """r - sum(l * r) / sum(l) with l an episode's trainable tokens; optimal baseline, arXiv 2505.23585."""
    episodes = make_episodes(config, batch)
    shifted, lengths = episodes.from_group_min, episodes.num_tokens
    baseline = episodes.group_sum(lengths * shifted) / episodes.group_sum(lengths).clamp(min=1)
    return finish(config, batch, (shifted - baseline[episodes.groups])[episodes.of_token])


def gpg(config: Config, batch: AdvantageBatch) -> Tensor:
    """alpha * (r - mu), alpha = B / (B - M): M of the B episodes lie in groups of equal rewards; arXiv 2504.02546.

    alpha makes up for the episodes without a signal. With none that has one, all advantages are 0.
    """
    episodes = make_episodes(config, batch)
    has_spread = _group_max(episodes, episodes.from_group_min)[episodes.groups] > 0
    alpha = len(episodes.rewards) / has_spread.sum().clamp(min=1)
    return finish(config, batch, (alpha * _centre(episodes)[0])[episodes.of_token])


def reinforce_plus_plus_baseline(config: Config, batch: AdvantageBatch) -> Tensor:
    """r - mu, then whitened over all trainable tokens of the batch; REINFORCE++-baseline, arXiv 2501.03262."""
    episodes = make_episodes(config, batch)
    return finish(config, batch, _centre(episodes)[0][episodes.of_token], always_whiten=True)


def _centre(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """(r - mu `[E]`, sigma `[G]`), both float64; sigma of a group of one is 0."""
    shifted, sizes = episodes.from_group_min, episodes.group_sizes
    centred = shifted - (episodes.group_sum(shifted) / sizes.clamp(min=1))[episodes.groups]
    std = (episodes.group_sum(centred.square()) / (sizes - 1).clamp(min=1)).sqrt()
    return centred, std


def _group_max(episodes: Episodes, x: Tensor) -> Tensor:
    """Largest of the non-negative `x [E]` in each group -> `[G]`."""
    return torch.zeros_like(episodes.group_sizes).scatter_reduce(0, episodes.groups, x, "amax")
