"""What runs of math-verify inside the fence; never imported by the run itself (sympy takes a second to import)."""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that are off, at every call


def warm_up() -> None:
    """Once before workers are forked: the first answers build tables, which takes 70 ms in every new worker."""
    for answer in ("\\boxed{\\frac{1}{2}}", "\\boxed{x^2+1}", "the answer is 3.5"):
        equal_to_any(["\\frac{2}{4}"], answer)


def equal_to_any(labels: list[str], response: str) -> float:
    """1.0 when the answer in `response` equals one of `labels`, else 0.0.

    math-verify's own time limits use SIGALRM, which only works in some threads; the fence's deadline takes their place.
    """
    answer = parse(response, parsing_timeout=0, raise_on_error=True)
    for label in labels:
        boxed = label if "\\boxed" in label else f"\\boxed{{{label}}}"
        wanted = parse(boxed, parsing_timeout=0, raise_on_error=True)
        if verify(wanted, answer, timeout_seconds=0, raise_on_error=True):
            return 1.0
    return 0.0
