"""Reward on the letter that a response chooses."""

from __future__ import annotations

import re
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import clean, final_answer, labels_of, without_thinking
from slime_rl.types import Sample

_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:,]|\s|$)")  # "B", "(b)", "C. because", "D) Paris"
_TEXT_COMMAND = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\{(.*)\}$")
_IN_TEXT = re.compile(r"\(([A-Z])\)|(?<![\w'])([A-Z])(?![\w'])")


async def multiple_choice(config: Config, group: list[Sample]) -> list[float | dict[str, Any]]:
    """1 where the chosen letter is the label's, else 0.

    The choice is the marked final answer, else a leading letter (`B. Paris`), else the last capital letter that stands
    alone. With `metadata["choices"]` (a list of texts for A, B, ...) the text of a choice counts as its letter, in
    responses and labels.
    """
    return [_score(sample) for sample in group]


def _score(sample: Sample) -> dict[str, Any]:
    given = sample.metadata.get("choices", ())
    if not isinstance(given, (list, tuple)):
        raise ValueError(
            f"--rm-type multiple_choice: metadata['choices'] of sample {sample.index} must be a list of texts, "
            f"got {given!r}"
        )
    choices = [str(choice) for choice in given]
    wanted = {_as_letter(label, choices) for label in labels_of(sample, "multiple_choice")}
    if None in wanted:
        raise ValueError(
            "--rm-type multiple_choice needs a letter (or the text of one of metadata['choices']) as label, got "
            f"{sample.label!r} for sample {sample.index}"
        )
    chosen = chosen_letter(sample.response, choices)
    return {"score": float(chosen in wanted), "answer": chosen}


def chosen_letter(response: str, choices: list[str]) -> str | None:
    """The letter that a response settles on, in upper case."""
    answer = final_answer(response)
    if answer is not None and (letter := _as_letter(answer, choices)) is not None:
        return letter
    text = without_thinking(response).strip()
    if (letter := _as_letter(text, choices)) is not None:
        return letter
    standing = [first or second for first, second in _IN_TEXT.findall(text) if (first or second) not in ("I", "A")]
    if not standing:  # "A" and "I" are words too: believed only where nothing else stands alone
        standing = [first or second for first, second in _IN_TEXT.findall(text)]
    return standing[-1] if standing else None


def _as_letter(text: str, choices: list[str]) -> str | None:
    text = clean(text)
    if command := _TEXT_COMMAND.match(text):
        text = command.group(1)
    folded = [choice.strip().casefold() for choice in choices]
    if text.casefold() in folded:
        return chr(ord("A") + folded.index(text.casefold()))
    match = _LETTER.match(text)
    if match is None or (match.group(1) in "aAI" and re.match(r"[aAI]\s+\w", text)):
        return None  # "A capital city", "I think"
    return match.group(1).upper()
