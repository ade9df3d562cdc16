"""What rewards do in the main process is linear in the text, whatever the text is: the event loop waits for it.

Work is counted in passes: the processor time of this thread, divided by what one plain loop over the same text takes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from slime_rl.rollout.rewards import judge, mathematics
from slime_rl.rollout.rewards.answers import clean, final_answer, labels_of, without_thinking
from slime_rl.rollout.rewards.code import program_of
from slime_rl.rollout.rewards.json_schema import json_text
from slime_rl.rollout.rewards.multiple_choice import chosen_letter
from slime_rl.rollout.rewards.numeric import response_number
from slime_rl.rollout.rewards.text import f1_score
from slime_rl.types import Sample

LENGTH = 400_000
MOST_PASSES = 150  # what is linear takes up to 30; what takes the square took 800 and more

PIECES = [
    ".", "`", ". ", "\n", " ", "$", "1 / ", "1,234,", "\\boxed{", "answer ", "<answer>", "```json\n", "\\text{",
    "3 1/2 ",
]  # fmt: skip
OPENINGS = ["", "Answer: "]


def in_math(text: str) -> Any:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="", label="5", response=text)
    return mathematics._decide(sample), mathematics._text_to_verify(sample)


def in_choices(text: str) -> Any:
    return chosen_letter(text, ["Rome", "Paris"])


def in_exact(text: str) -> Any:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="", label=text)
    return without_thinking(text).strip() in labels_of(sample, "exact")


def in_f1(text: str) -> Any:
    return f1_score(text, text)


READERS: list[Callable[[str], Any]] = [
    clean, final_answer, in_math, in_choices, in_exact, in_f1, response_number, json_text, program_of, judge._value,
]  # fmt: skip


def passes(read: Callable[[str], Any], text: str) -> float:
    started = time.thread_time()
    for _ in map(ord, text):
        pass
    one = time.thread_time() - started
    started = time.thread_time()
    read(text)
    return (time.thread_time() - started) / one


@pytest.mark.parametrize("read", READERS, ids=lambda read: getattr(read, "__name__", "read"))
def test_any_text_is_read_in_linear_time(read: Callable[[str], Any]) -> None:
    texts = [opening + piece * (LENGTH // len(piece)) for opening, piece in itertools.product(OPENINGS, PIECES)]
    texts.append("score:" + " " * LENGTH)
    for text in texts:  # one by one: what takes the square of a text should not be waited for forty times
        cost = passes(read, text)
        assert cost < MOST_PASSES, f"{text[:12]!r}…{text[-6:]!r}: {cost:.0f} passes"
