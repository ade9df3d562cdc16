"""Numbers in text as exact rationals, so that 20-digit integers, 1/3 and 3.70 compare without rounding."""

from __future__ import annotations

import re
from fractions import Fraction

# Longer ones are no answer to anything, and 1e999999999 as a rational would fill the memory.
MAX_DIGITS = 400

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][+-]?\d+)?"
_SIMPLE = re.compile(rf"[+-]?(?=[\d.]){_NUMBER}")
_RATIO = re.compile(rf"([+-]?)\s*((?=[\d.]){_NUMBER})\s*/\s*([+-]?(?=[\d.]){_NUMBER})")
_LATEX_RATIO = re.compile(r"([+-]?)\s*\\[dt]?frac\s*\{\s*([+-]?[\d.,]+)\s*\}\s*\{\s*([+-]?[\d.,]+)\s*\}")
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_IN_TEXT = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|(?<![\w.])[+-]?\.\d+")
_UNITS = re.compile(r"^\\?[$€£]\s*|\s*\\?[%°]$|\s*(?:dollars|percent|degrees)$", re.IGNORECASE)


def parse_rational(text: str) -> Fraction | None:
    """The number that the whole text is: `1/2`, `-3.70`, `1,234`, `2e3`, `\\frac{1}{2}`, `1 1/2`, `$5`, `40%` (as 40).

    None for anything else, a zero denominator and numbers of more than MAX_DIGITS digits.
    """
    text = text.strip()
    if len(text) > 2 * MAX_DIGITS:  # before any pattern, whose time may grow with the square of the length
        return None
    text = _UNITS.sub("", text.replace("\u2212", "-").replace("\\,", "").replace("\\!", "")).strip()
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


def last_rational(text: str) -> Fraction | None:
    """The last number that stands in a text."""
    found = _IN_TEXT.findall(text.replace("\u2212", "-"))
    return parse_rational(found[-1]) if found else None


def _simple(text: str) -> Fraction | None:
    text = text.replace(",", "")
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        return None
    try:
        return Fraction(text)
    except ValueError:  # "1.2.3" out of a LaTeX fraction
        return None


def _divide(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    return None if top is None or not bottom else top / bottom
