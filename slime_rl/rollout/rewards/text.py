"""Rewards on the text of a response: exact match and word overlap."""

from __future__ import annotations

import re
from collections import Counter

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import labels_of, without_thinking
from slime_rl.types import Sample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]")


async def exact(config: Config, group: list[Sample]) -> list[float]:
    """1 where the response, without its thoughts and surrounding space, is the label (or one of them), else 0."""
    return [float(without_thinking(s.response).strip() in labels_of(s, "exact")) for s in group]


async def f1(config: Config, group: list[Sample]) -> list[float]:
    """Harmonic mean of word precision and recall against the label; the best label where there are several.

    Case, punctuation and English articles do not count (the SQuAD convention). Two empty texts score 1.
    """
    return [max(f1_score(without_thinking(s.response), label) for label in labels_of(s, "f1")) for s in group]


def f1_score(answer: str, label: str) -> float:
    have, want = words(answer), words(label)
    if not have or not want:
        return float(have == want)
    common = sum((Counter(have) & Counter(want)).values())
    return 2 * common / (len(have) + len(want))


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split()
