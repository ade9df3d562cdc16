"""The last number in a text, where it stands for itself: the 2 of `\\sqrt{2}` or of `2x` is not what the text says."""

from __future__ import annotations

import re
from fractions import Fraction

from slime_rl.rollout.rewards.rationals import IN_TEXT, parse_rational, plain

_NEAR = 40  # characters on each side that decide; every pattern below sees no more than these
_BEFORE = re.compile(
    r"""(?: [+*/^_\u00d7·÷√{<≤≥≠-] | (?<![=-])> | [!<>]= | \||\d[:\u2013] | \d, | [\w)]\(  # 12:30, 1,2345, f(2)
    | \\(?!approx|implies|to\b|quad|[lL]?ong|[rR]ightarrow)[a-zA-Z]+  # \sqrt 2, \leq 2
    | (?:\b(?:plus|minus|times|over|by|root\ of))) $""",
    re.VERBOSE,
)
_AFTER = re.compile(
    r"""\s* (?: [+^\u00d7·÷√π∞_{<>≤≥≠=] | \*(?!\*) | \*\*[\w(] | [-/\u2013]\s*(?:[\d(\\]|[^\W\d_]\b)
    | \\(?!degree|q?quad|circ|end|[\])%$\\])  # 2\pi, 2\sqrt{3}
    | (?:hundred|thousand|million|billion|trillion|dozen|mn|bn|[kKMB])(?!\w)
    | (?:pi|times\s+\d|sqrt|log|ln|sin|cos|tan|exp)(?!\w)
    | [b-fijknopqrt-zXYZIEO²³](?!\w) )  # 2x, 2 y; but 2 m, 5 h, 3 a day
    | \( | \.\d | ,\d""",
    re.VERBOSE,
)
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)")
_LIST = re.compile(r"\d\s*+,\s*+$")


def last_rational(text: str, is_answer: bool = False) -> Fraction | None:
    """The last number that stands in a text; None when there is none, or it is part of something larger.

    In an answer, `10!` is a factorial and `3, 4` are two numbers; elsewhere they are a sentence's end and its commas.
    """
    text = _BOLD.sub("", plain(text))
    last = None
    for last in IN_TEXT.finditer(text):  # noqa: B007 - only the last match counts
        pass
    if last is None:
        return None
    before, after = text[max(0, last.start() - _NEAR) : last.start()], text[last.end() : last.end() + _NEAR]
    if _BEFORE.search(before.rstrip()) or _AFTER.match(after):
        return None
    if is_answer and (after.lstrip().startswith("!") or _LIST.search(before)):
        return None
    return parse_rational(last.group())
