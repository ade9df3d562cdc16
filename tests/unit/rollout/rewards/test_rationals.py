from __future__ import annotations

import time
from fractions import Fraction

import pytest

from slime_rl.rollout.rewards.rationals import last_rational, parse_rational


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
    started = time.monotonic()
    assert parse_rational("1" * 1_000_000) is None
    assert parse_rational(" " * 100_000 + "1/" * 100_000) is None
    assert time.monotonic() - started < 1.0


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
    ],
)
def test_the_last_number_of_a_text(text: str, value: Fraction | None) -> None:
    assert last_rational(text) == value
