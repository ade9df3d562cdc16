"""Reward for programs: the response's code runs against tests in a sandbox inside the fence.

response ──► last code block ──► one fresh interpreter a test (CPU, memory, time, file size, no network) ──► all passed?
"""

from __future__ import annotations

import re
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import without_thinking
from slime_rl.rollout.rewards.code_blocks import last_block
from slime_rl.rollout.rewards.fence import FenceAnswer, current_fence
from slime_rl.rollout.rewards.sandbox import MAX_OUTPUT_BYTES, WALL_FACTOR
from slime_rl.rollout.together import together
from slime_rl.types import Sample

FENCED = "slime_rl.rollout.rewards.code_fenced:passes"
GRACE_S = 5.0  # for the interpreter's start and end, on top of the program's own time
_PYTHON = ("python", "py", "python3", "py3")
# Not `\s*`, which would begin anew at every empty line.
_PROGRAM = re.compile(r"^[ \t]*(?:def |import |from |print\(|class )", re.MULTILINE)


async def code(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """1 where the response's program passes every test of `metadata["tests"]` (or of the label), else 0.

    A test is `{"input": text, "output": text}`: standard input and what the program must print, compared line by line
    without trailing space; or `{"assert": "assert f(2) == 4"}`: statements run after the program's. Each has
    --reward-timeout-s of CPU time. `passed` is the share of tests that pass, `failure` why the first failing one does.

    Raises:
        ValueError: a sample without tests, a test of another form, or with an output longer than a program may print.
    """
    return await together(_score(config, sample) for sample in group)


async def _score(config: Config, sample: Sample) -> dict[str, Any]:
    tests = tests_of(sample)
    source = program_of(sample.response)
    if source is None:
        return {"score": 0.0, "passed": 0.0, "failure": "no code"}
    seconds = config.reward.reward_timeout_s
    calls = [(source, test.get("input", ""), test.get("output"), test.get("assert"), seconds) for test in tests]
    answers = await current_fence().call_many(FENCED, calls, timeout_s=WALL_FACTOR * seconds + GRACE_S)
    problems = [_problem(answer) for answer in answers]
    passed = sum(problem == "" for problem in problems) / len(problems)
    value: dict[str, Any] = {"score": float(passed == 1.0), "passed": passed}
    if passed < 1.0:
        value["failure"] = next(problem for problem in problems if problem)
    return value


def _problem(answer: FenceAnswer) -> str:
    return str(answer.failure) if answer.failure is not None else answer.value


def program_of(response: str) -> str | None:
    """The last block of Python in a response, else the last one that names no language; the whole text when it has none
    but looks like a program; None else."""
    text = without_thinking(response)
    block = last_block(text, _PYTHON)
    if block is not None:
        return block
    return text if _PROGRAM.search(text) else None


def tests_of(sample: Sample) -> list[dict[str, str]]:
    """The checked tests of a sample."""
    tests = sample.metadata.get("tests", sample.label)
    if not isinstance(tests, list) or not tests:
        raise ValueError(
            f"--rm-type code needs metadata['tests'] (a list) for every prompt, got {tests!r} for sample {sample.index}"
        )
    for test in tests:
        fits = isinstance(test, dict) and all(isinstance(v, str) for v in test.values())
        if not fits or ("output" in test) == ("assert" in test):
            raise ValueError(
                f"--rm-type code: a test has texts 'input' and 'output', or 'assert', got {test!r} "
                f"for sample {sample.index}"
            )
        size = len(test.get("output", "").encode(errors="replace"))
        if size > MAX_OUTPUT_BYTES:
            raise ValueError(
                f"--rm-type code: a program may print {MAX_OUTPUT_BYTES} bytes, but the 'output' of a test has {size}, "
                f"for sample {sample.index}"
            )
    return tests
