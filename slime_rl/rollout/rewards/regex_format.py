"""Reward on the form of a response."""

from __future__ import annotations

import re
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.fence import current_fence
from slime_rl.types import Sample

DEFAULT_FORMAT = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


async def regex_format(config: Config, group: list[Sample]) -> list[float | dict[str, Any]]:
    """1 where the whole response matches `metadata["format"]` (a regular expression, `.` matches newlines), else 0.

    Without that key the format is `<think>...</think> <answer>...</answer>`, each tag once. Matching runs fenced: a
    pattern that backtracks without end scores 0 after --reward-timeout-s and is counted.

    Raises:
        ValueError: a format that is no regular expression.
    """
    patterns = [_pattern_of(sample) for sample in group]
    calls = [(pattern, sample.response) for pattern, sample in zip(patterns, group, strict=True)]
    answers = await current_fence().call_many("slime_rl.rollout.rewards.regex_format:matches", calls)
    return [a.score_dict() if a.failure else float(a.value) for a in answers]


def matches(pattern: str, response: str) -> bool:
    return re.fullmatch(pattern, response, re.DOTALL) is not None


def _pattern_of(sample: Sample) -> str:
    pattern = sample.metadata.get("format", DEFAULT_FORMAT)
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"--rm-type regex_format: metadata['format'] of sample {sample.index} must be a regular expression "
            f"({error}), got {str(pattern)[:100]!r}"
        ) from error
    return pattern
