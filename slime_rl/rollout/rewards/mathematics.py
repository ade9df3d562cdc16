"""Reward on mathematical answers: exact for numbers, by math-verify (sympy) for expressions.

response ──► final answer ──► equal text or equal rationals? ──► decided here
                                        └── else ──► math-verify in a fenced process, with a deadline
"""

from __future__ import annotations

from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import final_answer, has_unclosed_thinking, labels_of, without_thinking
from slime_rl.rollout.rewards.fence import current_fence
from slime_rl.rollout.rewards.rationals import parse_rational
from slime_rl.types import Sample

FENCED = "slime_rl.rollout.rewards.mathematics_fenced:equal_to_any"


async def math(config: Config, group: list[Sample]) -> list[float | dict[str, Any]]:
    """1 where the response's final answer equals the label (or one of them) mathematically, else 0.

    The final answer is the last box, `<answer>` or `Answer:`; without a mark math-verify looks for one in the text.
    Verification that hangs, crashes or fails scores 0 with `failure` in the sample's reward info and is counted by the
    fence. A thought that was not closed is graded as it is and noted as `unclosed_think`.
    """
    decided = [_decide(sample) for sample in group]
    open_calls = [(labels_of(s, "math"), _text_to_verify(s)) for s, d in zip(group, decided, strict=True) if d is None]
    answers = iter(await current_fence().call_many(FENCED, open_calls) if open_calls else ())
    values: list[float | dict[str, Any]] = []
    for sample, score in zip(group, decided, strict=True):
        value: dict[str, Any] = {"score": score} if score is not None else next(answers).score_dict()
        value["answer"] = final_answer(sample.response)
        if has_unclosed_thinking(sample.response):
            value["unclosed_think"] = 1.0
        values.append(value)
    return values


def _decide(sample: Sample) -> float | None:
    """The score where no algebra is needed: equal texts, or numbers on both sides. None where it is."""
    answer = final_answer(sample.response)
    labels = labels_of(sample, "math")
    if answer is None:
        return None if without_thinking(sample.response).strip() else 0.0
    if answer in labels:
        return 1.0
    number, wanted = parse_rational(answer), [parse_rational(label) for label in labels]
    if number is None or None in wanted:
        return None
    return float(number in wanted)


def _text_to_verify(sample: Sample) -> str:
    answer = final_answer(sample.response)
    return without_thinking(sample.response) if answer is None else f"\\boxed{{{answer}}}"
