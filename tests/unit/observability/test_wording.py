from __future__ import annotations

import math

import pytest

from slime_rl.observability.wording import duration, number, one_line, size, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.421, "0.42 s"), (12.34, "12.3 s"), (65, "1 min 05 s"), (3599.6, "1 h 00 min"), (7620, "2 h 07 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.0, "0"), (1.0, "1"), (0.12345, "0.123"), (12.34, "12.3"), (123.45, "123.5"), (1234.5, "1 234")],
        *[(2.5e-6, "2.50e-06"), (-0.5, "-0.5"), (3e9, "3.00e+09"), (math.nan, "nan"), (1_234_567.0, "1 234 567")],
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("count", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (3 * 1024**3, "3.0 GiB")])
def test_size(count: float, text: str) -> None:
    assert size(count) == text


def test_sparkline_spans_lowest_to_highest_and_never_grows_past_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert len(sparkline(range(1000), width=40)) == 40
    assert sparkline([0, 0, 8, 8], width=2) == "▁█"


def test_long_text_keeps_its_beginning_and_end() -> None:
    assert one_line("a\n  b", 10) == "a b"
    short = one_line("start " + "x" * 100 + " end", 30)
    assert len(short) == 30 and short.startswith("start") and short.endswith("end")
