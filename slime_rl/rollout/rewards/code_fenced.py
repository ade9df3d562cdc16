"""What runs of the code reward inside the fence: one program against one test."""

from __future__ import annotations

import secrets

from slime_rl.rollout.rewards.sandbox import run_program


def passes(source: str, stdin: str, output: str | None, check: str | None, seconds: float) -> str:
    """Why the program does not pass; "" when it does.

    A program with `check` behind it must reach its end: leaving early with status 0 does not pass.
    """
    mark = secrets.token_hex(16)
    program = source if check is None else f"{source}\n\n{check}\nprint({mark!r})\n"
    run = run_program(program, stdin, seconds)
    if run["problem"]:
        return run["problem"]
    if check is not None:
        reached = run["output"].rstrip("\n").endswith(mark) and run["status"] == 0
        return "" if reached else "assertion" if "AssertionError" in run["errors"] else "error"
    if run["status"] != 0:
        return "error"
    assert output is not None
    return "" if lines_of(run["output"]) == lines_of(output) else "wrong output"


def lines_of(text: str) -> list[str]:
    """Lines without trailing space, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
