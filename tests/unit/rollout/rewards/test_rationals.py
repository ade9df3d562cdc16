from __future__ import annotations

import time
from fractions import Fraction

import pytest

from slime_rl.rollout.rewards.last_number import last_rational
from slime_rl.rollout.rewards.rationals import parse_rational


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("34", Fraction(34)),
        ("-34", Fraction(-34)),
        ("\u221234", Fraction(-34)),
        ("+7", Fraction(7)),
        ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)),
        ("0.1", Fraction(1, 10)),
        ("3.70", Fraction(37, 10)),
        (".5", Fraction(1, 2)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("12345678901234567891", Fraction(12345678901234567891)),
        ("1e3", Fraction(1000)),
        ("1 000", Fraction(1000)),
        (r"1\,000", Fraction(1000)),
        (r"3\times10^{2}", Fraction(300)),
        ("2.5 \u00d7 10^-1", Fraction(1, 4)),
        ("2.5e-1", Fraction(1, 4)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{2}{4}", Fraction(-1, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("$5", Fraction(5)),
        (r"\$1,000", Fraction(1000)),
        ("40%", Fraction(40)),
        ("12 dollars", Fraction(12)),
    ],
)
def test_numbers_are_exact(text: str, value: Fraction) -> None:
    assert parse_rational(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", "1,2", "(1,2)", "1.2.3", "1e999999999", "9" * 500, "5 apples", "-", "."]
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert parse_rational(text) is None


def test_a_long_text_is_refused_at_once() -> None:
    started = time.process_time()
    assert parse_rational("1" * 1_000_000) is None
    assert parse_rational(" " * 100_000 + "1/" * 100_000) is None
    assert time.process_time() - started < 5.0, "of CPU time"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 + 30 = 42", Fraction(42)),
        ("that makes 42.", Fraction(42)),
        ("between 3 and -4", Fraction(-4)),
        ("3/4 of it", Fraction(3, 4)),
        ("costs $1,250.50!", Fraction(2501, 2)),
        ("x2", None),
        ("none", None),
        ("The result is 1e5", Fraction(100_000)),
        ("1e5 meters", Fraction(100_000)),
        ("It takes 3 1/2 hours", Fraction(7, 2)),
        ("about 1 000 people", Fraction(1000)),
        ("it is **34** apples", Fraction(34)),
        (r"so $\frac{1}{2}$ cup", Fraction(1, 2)),
        ("so => 5", Fraction(5)),
        ("Total: 5", Fraction(5)),
        (r"10 \text{ cm}^2", Fraction(10)),
        ("10 m/s^2", Fraction(10)),
        (r"45^\circ", Fraction(45)),
        (r"90\%", Fraction(90)),
        ("a 5-day trip", Fraction(5)),
        ("5 a day", Fraction(5)),
        ("5 (five)", Fraction(5)),
        ("$18 per day", Fraction(18)),
        (r"\sqrt{2}", None),
        (r"\sqrt 2", None),
        ("2^10", None),
        ("2**10", None),
        ("2x + 3", None),
        ("2x", None),
        (r"2\pi", None),
        ("2π", None),
        ("12 + 30", None),
        ("8-3", None),
        ("3 million", None),
        ("5k", None),
        ("x <= 5", None),
        (r"x \geq 5", None),
        ("12:30", None),
        ("1.2.3", None),
        ("f(2)", None),
        ("1,2345", None),
    ],
)
def test_the_last_number_of_a_text(text: str, value: Fraction | None) -> None:
    assert last_rational(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("10!", None), ("3, 4", None), ("72 apples", Fraction(72)), ("1 000 m", Fraction(1000))]
)
def test_an_answer_is_read_more_strictly_than_a_sentence(text: str, value: Fraction | None) -> None:
    assert last_rational(text, is_answer=True) == value
