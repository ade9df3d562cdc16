"""Reward on numbers, compared exactly as rationals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import final_answer, labels_of, without_thinking
from slime_rl.rollout.rewards.last_number import last_rational
from slime_rl.rollout.rewards.rationals import parse_rational
from slime_rl.types import Sample


async def numeric(config: Config, group: list[Sample]) -> list[float | dict[str, Any]]:
    """1 where the response's number equals the label's exactly (`0.5` is `1/2`; no tolerance), else 0.

    The number is the marked final answer (box, tag, `Answer:`), else the last number in the text. One that is part of
    something else (`2x`, `\\sqrt{2}`, `2^10`, `3 million`) is not understood, and what is not understood is not right.

    Raises:
        ValueError: a label is not a number.
    """
    return [_score(sample) for sample in group]


def _score(sample: Sample) -> dict[str, Any]:
    wanted = [_label_number(sample, label) for label in labels_of(sample, "numeric")]
    number = response_number(sample.response)
    return {"score": float(number in wanted), "answer": None if number is None else str(number)}


def response_number(response: str) -> Fraction | None:
    """The number that a response answers with."""
    answer = final_answer(response)
    if answer is None:
        return last_rational(without_thinking(response))
    left, _, right = answer.rpartition("=")
    number = None if left.endswith(("!", "<", ">")) else parse_rational(right)  # x <= 5 is not 5
    return last_rational(answer, is_answer=True) if number is None else number


def _label_number(sample: Sample, label: str) -> Fraction:
    number = parse_rational(label)
    if number is None:
        raise ValueError(
            f"--rm-type numeric needs labels like 34, 3.7 or 1/2, got {label!r} for sample {sample.index}; "
            "--rm-type math compares expressions"
        )
    return number
