"""Exact match that pays a little for brevity: a reward with shaping, and with more than one number for the log.

--reward-function-path plugins.rewards.short_exact:reward
"""

from __future__ import annotations

from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import final_answer, labels_of, without_thinking
from slime_rl.types import Sample

# What the longest allowed right answer loses. Below 1, so that a long right answer still beats every wrong one.
LENGTH_SHARE = 0.5


async def reward(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """0 for a wrong answer; for a right one 1, less LENGTH_SHARE times the share of --max-response-len it used up.

    Wrong answers are not shaped: a penalty on them would teach to be wrong quickly.
    """
    limit = config.sampling.max_response_len
    values: list[dict[str, Any]] = []
    for sample in group:
        correct = float(_answer(sample) in labels_of(sample, "short_exact"))
        used = min(sample.response_length / limit, 1.0)
        values.append({"score": correct * (1.0 - LENGTH_SHARE * used), "correct": correct})
    return values


def _answer(sample: Sample) -> str:
    marked = final_answer(sample.response)
    return without_thinking(sample.response).strip() if marked is None else marked
