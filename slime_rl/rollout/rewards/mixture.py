"""A weighted sum of rewards, chosen per row."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import RewardFunction
from slime_rl.registry import ExtensionPoint
from slime_rl.types import Sample

LARGEST = sys.float_info.max


async def mixture(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """The sum of weight * reward over `metadata["rewards"]`, a dictionary such as {"math": 1.0, "regex_format": 0.2}.

    Rows without it use --reward-mixture. A name is a built-in or package.module:name. The parts are kept as
    `reward/<name>` in the sample's reward info.

    Raises:
        ValueError: a row without any reward, a weight that is no number, or a name that cannot be loaded.
    """
    weights = [weights_of(config, sample) for sample in group]
    names = list(dict.fromkeys(name for row in weights for name in row))
    members = {name: [i for i, row in enumerate(weights) if name in row] for name in names}
    functions = {name: load_reward(name) for name in names}
    found = await asyncio.gather(*(functions[n](config, [group[i] for i in members[n]]) for n in names))
    values: list[dict[str, Any]] = [{"score": 0.0} for _ in group]
    for name, scores in zip(names, found, strict=True):
        for i, score in zip(members[name], scores, strict=True):
            number = float(score["score"] if isinstance(score, dict) else score)
            values[i]["score"] += weights[i][name] * number
            values[i][f"reward/{name}"] = number
    return values


def weights_of(config: Config, sample: Sample) -> dict[str, float]:
    """Weight of each reward for one sample."""
    given = sample.metadata.get("rewards")
    if given is None:
        given = dict(config.reward.mixture_weights)
    if not isinstance(given, dict) or not given:
        raise ValueError(
            f"--rm-type mixture needs metadata['rewards'] or --reward-mixture for every prompt, got {given!r} "
            f"for sample {sample.index}"
        )
    for name, weight in given.items():
        if not isinstance(name, str):
            raise ValueError(f"--rm-type mixture: a reward of sample {sample.index} is named {name!r}, no text")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"--rm-type mixture: weight of {name!r} of sample {sample.index} is {weight!r}, no number")
        if not abs(weight) <= LARGEST:
            raise ValueError(f"--rm-type mixture: weight of {name!r} of sample {sample.index} must be finite")
    return {name: float(weight) for name, weight in given.items()}


def load_reward(name: str) -> RewardFunction:
    """A built-in reward or one of package.module:name, its signature checked."""
    from slime_rl.rollout.rewards import REWARDS  # this module is one of them

    point: ExtensionPoint = dataclasses.replace(REWARDS, flag="--reward-mixture")
    found = point.load(name)
    if found is mixture:  # by its name, or by module:name
        raise ValueError(f"--reward-mixture: {name!r}: a mixture cannot contain itself")
    return found
