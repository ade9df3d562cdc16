"""The greedy response of a prompt and its reward: the baseline of ReMax (arXiv 2310.10505)."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any

from slime_rl.data.episodes import mean, role_of
from slime_rl.types import Group, Sample

BASELINE = "baseline_reward"  # in Sample.reward_info; becomes `baseline_rewards` of the batch

Generate = Callable[[Sample, dict[str, Any]], Awaitable[list[Sample]]]
Score = Callable[[list[Sample]], Awaitable[None]]


def bare_sample(group: Group) -> Sample:
    """A fresh sample of the group's prompt; nothing that generating and scoring it does reaches the others."""
    first = group.samples[0]
    return Sample(
        index=first.index,
        group_index=first.group_index,
        rollout_id=first.rollout_id,
        prompt=copy.deepcopy(first.prompt),
        label=copy.deepcopy(first.label),
        metadata=copy.deepcopy(first.metadata),
        tokens=first.tokens[: first.prompt_length],
        prompt_length=first.prompt_length,
    )


async def add_greedy_baseline(group: Group, sampling_params: dict[str, Any], generate: Generate, score: Score) -> bool:
    """Generate one response at temperature 0, score it, and note its reward (for agents with roles, that of the
    same role) in every sample of the group.

    False when it was interrupted: the group has no baseline yet.
    """
    greedy = {**sampling_params, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
    samples = await generate(bare_sample(group), greedy)
    if not all(sample.status.is_finished for sample in samples):
        return False
    await score(samples)
    roles = {role_of(sample): [s.reward or 0.0 for s in samples if role_of(s) == role_of(sample)] for sample in samples}
    whole = mean([sample.reward or 0.0 for sample in samples])
    for sample in group.samples:
        role = roles.get(role_of(sample))  # one that took no part in the greedy episode is compared with all of it
        sample.reward_info = {**sample.reward_info, BASELINE: whole if role is None else mean(role)}
    return True
