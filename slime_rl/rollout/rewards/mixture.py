"""A weighted sum of rewards, chosen per row."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import RewardFunction
from slime_rl.registry import ExtensionPoint, own_code
from slime_rl.rollout.rewards.values import read_values
from slime_rl.rollout.together import together
from slime_rl.types import Sample

LARGEST = sys.float_info.max


async def mixture(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """The sum of weight * reward over `metadata["rewards"]`, a dictionary such as {"math": 1.0, "regex_format": 0.2}.

    Rows without it use --reward-mixture. A name is a built-in or package.module:name. The parts are kept as
    `reward/<name>` in the sample's reward info, what else a part tells as `<name>/<key>`.

    Raises:
        ValueError: a row without any reward, a weight that is no number, a name that cannot be loaded, or a
            function that does not return a finite number for each of its samples.
    """
    weights = [weights_of(config, sample) for sample in group]
    names = list(dict.fromkeys(name for row in weights for name in row))
    members = {name: [i for i, row in enumerate(weights) if name in row] for name in names}
    functions = {name: load_reward(name) for name in names}
    parts = {name: [group[i] for i in members[name]] for name in names}
    found = await together(_ask(config, name, functions[name], parts[name]) for name in names)
    values: list[dict[str, Any]] = [{"score": 0.0} for _ in group]
    for name, told in zip(names, found, strict=True):
        for i, (number, info) in zip(members[name], told, strict=True):
            values[i]["score"] += weights[i][name] * number
            values[i][f"reward/{name}"] = number
            values[i] |= {f"{name}/{key}": value for key, value in info.items()}
    return values


async def _ask(
    config: Config, name: str, function: RewardFunction, samples: list[Sample]
) -> list[tuple[float, dict[str, Any]]]:
    """Number and further information that one part gives for each; it gets a list of its own, that it may empty."""
    flag = f"--rm-type mixture: {name}"
    with own_code(flag, explained=() if ":" in name else (ValueError, TimeoutError)):
        values = await function(config, list(samples))
    return read_values(flag, samples, values)


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
