"""Numbers in text as exact rationals, so that 20-digit integers, 1/3 and 3.70 compare without rounding."""

from __future__ import annotations

import re
from fractions import Fraction

# Longer ones are no answer to anything, and 1e999999999 as a rational would fill the memory.
MAX_DIGITS = 400

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)"  # 1,000 or 1 000
_NUMBER = rf"{_WHOLE}?(?:\.\d+)?(?:[eE][+-]?\d+)?"
_SIMPLE = re.compile(rf"[+-]?(?=[\d.]){_NUMBER}")
_RATIO = re.compile(rf"([+-]?)\s*((?=[\d.]){_NUMBER})\s*/\s*([+-]?(?=[\d.]){_NUMBER})")
_LATEX_RATIO = re.compile(r"([+-]?)\s*\\[dt]?frac\s*\{\s*([+-]?[\d.,]+)\s*\}\s*\{\s*([+-]?[\d.,]+)\s*\}")
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
# A number inside other text: 3 1/2, \frac{1}{2}, 1/2, 1 000, 1e5, .5
IN_TEXT = re.compile(
    r"(?<![\w.])[+-]?(?:\d{1,3} \d{1,3}/\d{1,3}(?!\d)|\\[dt]?frac *+\{ *+[\d.,]++ *+\} *+\{ *+[\d.,]++ *+\}"
    rf"|{_WHOLE}(?:\.\d+)?(?:[eE][+-]?\d+)?(?:\s*+/\s*+\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
)
_POWER_OF_TEN = re.compile(r"(?<=\d)\s*+(?:\\times|\\cdot|[\u00d7·*x])\s*+10\s*+\^(?:\{([+-]?\d++)\}|([+-]?\d++))")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox)\s*+\{([^{}]*+)\}")
_DEGREES = re.compile(r"\^(?:\\circ|\{\\circ\})")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\^(?:\{-?\d\}|-?\d)(?!\d)")
_SPACES = re.compile(r"\\[;: ]|[\u00a0\u2009\u202f]")
_UNITS = re.compile(r"^\\?[$€£]\s*|\s*\\?[%°]$|\s*(?:dollars|percent|degrees)$", re.IGNORECASE)


def parse_rational(text: str) -> Fraction | None:
    """The number that the whole text is: `1/2`, `-3.70`, `1,234`, `1 234`, `2e3`, `2 \\times 10^3`,
    `\\frac{1}{2}`, `1 1/2`, `$5`, `40%` (as 40).

    None for anything else, a zero denominator and numbers of more than MAX_DIGITS digits.
    """
    text = text.strip()
    if len(text) > 2 * MAX_DIGITS:  # before any pattern, whose time may grow with the square of the length
        return None
    text = _UNITS.sub("", plain(text).strip()).strip()
    if _SIMPLE.fullmatch(text):
        return _simple(text)
    if match := _MIXED.fullmatch(text):
        sign, whole, top, bottom = match.groups()
        part = _divide(_simple(top), _simple(bottom))
        return None if part is None else (Fraction(int(whole)) + part) * (-1 if sign == "-" else 1)
    if match := _RATIO.fullmatch(text) or _LATEX_RATIO.fullmatch(text):
        sign, top, bottom = match.groups()
        value = _divide(_simple(top), _simple(bottom))
        return None if value is None else value * (-1 if sign == "-" else 1)
    return None


def plain(text: str) -> str:
    """The text with one way to write minus, spaces and powers of ten, and without the marks around words and units."""
    text = text.replace("\u2212", "-").replace("\\!", "").replace("\\,", " ")
    text = _POWER_OF_TEN.sub(r"e\1\2", _SPACES.sub(" ", text))
    return _UNIT_POWER.sub("", _DEGREES.sub("", _WORDS.sub(r" \1", text)))


def _simple(text: str) -> Fraction | None:
    text = text.replace(",", "").replace(" ", "")
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        return None
    try:
        return Fraction(text)
    except ValueError:  # "1.2.3" out of a LaTeX fraction
        return None


def _divide(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    return None if top is None or not bottom else top / bottom
