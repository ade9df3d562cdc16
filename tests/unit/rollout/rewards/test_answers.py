from __future__ import annotations

import pytest

from slime_rl.rollout.rewards.answers import clean, final_answer, has_unclosed_thinking, labels_of, last_boxed
from slime_rl.types import Sample


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"Answer: \boxed{5}", "5"),
        (r"so \boxed{\frac{1}{2}} and more", r"\frac{1}{2}"),
        (r"\boxed{3} no, \boxed{4}.", "4"),
        (r"\boxed 7", "7"),
        (r"\fbox{8}", "8"),
        ("**Answer:** 34", "34"),
        ("**Answer: 34**", "34"),
        ("Final answer: $x + 1$.", "x + 1"),
        ("The answer is (B).", "(B)"),
        ("work\n#### 1,234", "1,234"),
        ("<answer> 12 </answer>", "12"),
        ("Answer: 1\nwait\nAnswer: 2\nthanks", "2"),
        (r"<think>\boxed{1}</think> Answer: 2", "2"),
        ("ANSWER: -3", "-3"),
        (r"\boxed{} Answer: 9", "9"),
        (r"\boxed{6} then \boxed{7", "6"),
        ("it is 5", None),
        ("", None),
        ("the answering machine", None),
    ],
)
def test_the_final_answer_is_found(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


def test_a_long_response_is_read_in_linear_time() -> None:
    assert final_answer(r"\boxed{" * 20_000 + "answer is " * 20_000) is None


def test_boxes_keep_nested_braces() -> None:
    assert last_boxed(r"\boxed{\frac{1}{\sqrt{2}}}") == r"\frac{1}{\sqrt{2}}"


@pytest.mark.parametrize(
    ("raw", "cleaned"), [(" **5** . ", "5"), ("$5$", "5"), (r"\(x\)", "x"), ("`a`.", "a"), ("**", "**"), ("", "")]
)
def test_marks_around_an_answer_are_removed(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned


def test_unclosed_thinking_is_noticed() -> None:
    assert has_unclosed_thinking("<think> hm 5")
    assert not has_unclosed_thinking("<think> hm </think> 5")
    assert not has_unclosed_thinking("5")


def test_a_missing_label_is_an_error_with_the_flag() -> None:
    sample = Sample(index=7, group_index=0, rollout_id=7, prompt="2+3=")
    with pytest.raises(ValueError, match=r"--rm-type exact needs a label.*sample 7.*--label-key"):
        labels_of(sample, "exact")


def test_zero_and_empty_text_are_labels() -> None:
    assert labels_of(Sample(index=0, group_index=0, rollout_id=0, prompt="", label=0), "exact") == ["0"]
    assert labels_of(Sample(index=0, group_index=0, rollout_id=0, prompt="", label=""), "exact") == [""]
