"""Reward by the verifiers of the reasoning-gym package, for prompts of `plugins.data.reasoning_gym_source`.

    --reward-function-path plugins.rewards.reasoning_gym:reward

response ──► its marked final answer, or all of it ──► the task's verifier, in a fenced process with a deadline
"""

from __future__ import annotations

from typing import Any

from plugins.data.reasoning_gym_source import METADATA_KEY
from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import final_answer, without_thinking
from slime_rl.rollout.rewards.fence import current_fence
from slime_rl.types import Sample

FENCED = "plugins.rewards.reasoning_gym_fenced:score"


async def reward(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """The verifier's score of each response, between 0 and 1; some verifiers give a part for what is nearly right.

    A verifier that hangs over --reward-timeout-s, crashes or raises scores 0, with `failure` in the reward info.

    Raises:
        ValueError: a sample without the metadata that the source writes.
    """
    calls = [(*_task_and_entry(sample), answer_of(sample.response)) for sample in group]
    answers = await current_fence().call_many(FENCED, calls)
    values: list[dict[str, Any]] = []
    for answer in answers:
        value = answer.score_dict()
        values.append({**value, "solved": float(value["score"] == 1.0)})
    return values


def answer_of(response: str) -> str:
    """The answer that the response marks as final (`Answer: 5`, `the answer is 5`, a box), else its whole text."""
    marked = final_answer(response)
    return without_thinking(response).strip() if marked is None else marked


def _task_and_entry(sample: Sample) -> tuple[str, dict[str, Any]]:
    told = sample.metadata.get(METADATA_KEY)
    if not isinstance(told, dict) or not {"task", "entry"} <= told.keys():
        raise ValueError(
            f"plugins.rewards.reasoning_gym needs metadata[{METADATA_KEY!r}] with 'task' and 'entry' for every prompt, "
            f"got {told!r} for sample {sample.index}; take prompts from plugins.data.reasoning_gym_source"
        )
    return told["task"], told["entry"]
