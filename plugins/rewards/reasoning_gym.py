"""Reward by the verifiers of the reasoning-gym package, for prompts of `plugins.data.reasoning_gym_source`.

    --reward-function-path plugins.rewards.reasoning_gym:reward

response ──► its answer ──► the task's verifier, in a fenced process with a deadline ──► score
"""

from __future__ import annotations

from typing import Any

from plugins.data.reasoning_gym_source import METADATA_KEY
from plugins.data.reasoning_gym_tasks import is_number
from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import final_answer, without_thinking
from slime_rl.rollout.rewards.fence import current_fence
from slime_rl.rollout.rewards.numeric import response_number
from slime_rl.types import Sample

FENCED = "plugins.rewards.reasoning_gym_fenced:score"


async def reward(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """The verifier's score of each response, between 0 and 1.

    Some verifiers give a part for what is nearly right. Where the right answer is a number it is all or nothing: the
    package would give 0.5 for 16 where 6 is right. A verifier that hangs over --reward-timeout-s, crashes or raises
    scores 0, with `failure` in the reward info.

    Raises:
        ValueError: a sample without the metadata that the source writes.
    """
    told = [_task_and_entry(sample) for sample in group]
    calls = [(task, entry, answer_of(s.response, entry)) for s, (task, entry) in zip(group, told, strict=True)]
    answers = await current_fence().call_many(FENCED, calls)
    values: list[dict[str, Any]] = []
    for answer, (_, entry) in zip(answers, told, strict=True):
        value = answer.score_dict()
        if is_number(entry["answer"]):
            value["score"] = float(value["score"] == 1.0)
        values.append(value)
    return values


def answer_of(response: str, entry: dict[str, Any]) -> str:
    """What the verifier is asked about.

    Where the right answer is a number, the whole number that the response marks as its answer or else ends with.
    Otherwise the marked answer (`Answer: red`, `the answer is red`, a box), or the whole text when nothing is marked.
    """
    if is_number(entry["answer"]):
        number = response_number(response)
        if number is not None and number.denominator == 1:
            return str(number.numerator)
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
