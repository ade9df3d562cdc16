"""What runs of the code reward inside the fence: one program against one test."""

from __future__ import annotations

from slime_rl.rollout.rewards.sandbox import run_program


def passes(source: str, stdin: str, output: str | None, check: str | None, seconds: float) -> str:
    """Why the program does not pass; "" when it does.

    With `check` the end of those statements must be reached: leaving early with status 0 does not pass.
    """
    run = run_program(source, stdin, seconds, check=check)
    if run["problem"]:
        return run["problem"]
    if check is not None:
        return "" if run["passed"] else "assertion" if "AssertionError" in run["errors"] else "error"
    if run["status"] != 0:
        return "error"
    assert output is not None
    return "" if lines_of(run["output"]) == lines_of(output) else "wrong output"


def lines_of(text: str) -> list[str]:
    """Lines without trailing space, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
