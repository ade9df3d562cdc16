from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.config import Config
from slime_rl.protocols import RewardFunction
from slime_rl.rollout.rewards import FENCED_MODULES, REWARDS
from slime_rl.rollout.rewards.fence import ProcessFence, use_fence
from slime_rl.types import Sample


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_config(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def fence() -> Iterator[ProcessFence]:
    with ProcessFence(1, timeout_s=60.0) as fence, use_fence(fence):
        yield fence


def group_of(rows: list[tuple[Any, str]], metadata: dict[str, Any] | None = None) -> list[Sample]:
    return [
        Sample(
            index=i, group_index=0, rollout_id=i, prompt="?", label=label, response=text, metadata=dict(metadata or {})
        )
        for i, (label, text) in enumerate(rows)
    ]


def values(config: Config, fence: ProcessFence, name: str, group: list[Sample]) -> list[Any]:
    async def scored() -> list[Any]:
        with use_fence(fence):
            reward: RewardFunction = REWARDS.load(name)
            return await reward(config, group)

    return asyncio.run(scored())


def scores(config: Config, fence: ProcessFence, name: str, rows: list[tuple[Any, str]], **metadata: Any) -> list[float]:
    found = values(config, fence, name, group_of(rows, metadata))
    return [value["score"] if isinstance(value, dict) else value for value in found]


@pytest.mark.parametrize("name", sorted(REWARDS.builtins))
def test_every_builtin_loads_and_fits_its_protocol(name: str) -> None:
    assert callable(REWARDS.load(name))
    assert set(FENCED_MODULES) <= set(REWARDS.builtins)


def test_exact_compares_the_whole_response(config: Config, fence: ProcessFence) -> None:
    rows = [("85", " 85\n"), ("85", "Answer: 85"), ("85", "<think>84</think>85"), (["4", "four"], "four"), (0, "0")]
    assert scores(config, fence, "exact", rows) == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_numeric_is_exact(config: Config, fence: ProcessFence) -> None:
    rows = [
        ("1/2", "0.5"),
        ("3.7", "Answer: 3.70"),
        ("12345678901234567890", "12345678901234567890"),
        ("12345678901234567890", "12345678901234567891"),
        ("34", "**Answer:** 34"),
        (5, r"Answer: \boxed{5}"),
        ("42", "First 7, then 12 + 30 = 42."),
        ("42", r"\boxed{x = 42}"),
        ("72", "Answer: 72 apples"),
        ("1/3", "0.333"),
        ("5", "no idea"),
        ("5", ""),
        ("1,000", "1000"),
    ]
    assert scores(config, fence, "numeric", rows) == [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]


def test_numeric_takes_nothing_for_right_that_it_does_not_understand(config: Config, fence: ProcessFence) -> None:
    rows = [
        ("1", "The result is 1e5"),
        ("2", r"\boxed{\sqrt{2}}"),
        ("2", r"\boxed{3\times10^{2}}"),
        ("10", r"\boxed{10!}"),
        ("10", "Answer: 2^10"),
        ("5", "Answer: x <= 5"),
        ("5", r"\boxed{x \neq 5}"),
    ]
    assert scores(config, fence, "numeric", rows) == [0.0] * len(rows)
    rows = [("7/2", "It takes 3 1/2 hours"), ("1000", "Answer: 1 000"), ("300", r"\boxed{3\times10^{2}}")]
    assert scores(config, fence, "numeric", rows) == [1.0] * len(rows)


def test_numeric_refuses_labels_that_are_no_number(config: Config, fence: ProcessFence) -> None:
    with pytest.raises(ValueError, match=r"--rm-type numeric needs labels like.*'x'.*sample 0"):
        scores(config, fence, "numeric", [("x", "5")])


def test_multiple_choice_finds_the_letter(config: Config, fence: ProcessFence) -> None:
    rows = [
        ("B", "Answer: B"),
        ("(b)", "The answer is (B)."),
        ("B", "B. Paris"),
        ("C", r"I think \boxed{\text{C}}"),
        ("D", "It cannot be A or B, so it must be (D)"),
        ("B", "**Answer:** C"),
        ("A", "A capital city is what we look for, so it is C"),
        ("A", "I don't know"),
        ("A", "**A**"),
    ]
    assert scores(config, fence, "multiple_choice", rows) == [1, 1, 1, 1, 1, 0, 0, 0, 1]
    rows = [("B", "Answer: Paris"), ("Paris", "B"), ("Rome", "Answer: paris.")]
    assert scores(config, fence, "multiple_choice", rows, choices=["Rome", "Paris"]) == [1, 1, 0]


def test_multiple_choice_refuses_labels_that_are_no_letter(config: Config, fence: ProcessFence) -> None:
    with pytest.raises(ValueError, match=r"needs a letter.*'Paris'"):
        scores(config, fence, "multiple_choice", [("Paris", "B")])
    with pytest.raises(ValueError, match=r"metadata\['choices'\] of sample 0 must be a list of texts, got None"):
        scores(config, fence, "multiple_choice", [("B", "B")], choices=None)


def test_f1_counts_common_words(config: Config, fence: ProcessFence) -> None:
    rows = [("the cat sat", "A cat sat."), ("cat sat", "cat"), ("cat", "dog"), (["dog", "big cat"], "cat"), ("", "")]
    assert scores(config, fence, "f1", rows) == pytest.approx([1.0, 2 / 3, 0.0, 2 / 3, 1.0])


def test_regex_format_matches_the_whole_response(config: Config, fence: ProcessFence) -> None:
    good = "<think>a\nb</think>\n<answer>5</answer>"
    rows = [(None, good), (None, good + " more"), (None, "<answer>5</answer>"), (None, good.replace("a", "<think>"))]
    assert scores(config, fence, "regex_format", rows) == [1, 0, 0, 0]
    assert scores(config, fence, "regex_format", [(None, "12"), (None, "12a")], format=r"\d+") == [1, 0]
    with pytest.raises(ValueError, match="must be a regular expression"):
        scores(config, fence, "regex_format", [(None, "12")], format="(")
    for pattern in ("(" * 3000 + ")" * 3000, "a{99999999999999999999}"):
        with pytest.raises(ValueError, match="must be a regular expression"):
            scores(config, fence, "regex_format", [(None, "12")], format=pattern)


def test_a_pattern_that_backtracks_for_ever_costs_its_sample_only(config: Config) -> None:
    with ProcessFence(1, timeout_s=0.7) as impatient:
        group = group_of([(None, "aaab"), (None, "a" * 60 + "c"), (None, "aab")], {"format": "(a+)+b"})
        found = values(config, impatient, "regex_format", group)
        assert [v["score"] if isinstance(v, dict) else v for v in found] == [1.0, 0.0, 1.0]
        assert found[1]["failure"] == "timeout"
        assert impatient.metrics()["rewards/timeouts"] == 1.0


def test_math_accepts_equal_answers_in_any_form(config: Config, fence: ProcessFence) -> None:
    rows = [
        ("5", r"Answer: \boxed{5}"),
        ("1/2", r"\boxed{0.5}"),
        (r"\frac{1}{2}", "Answer: 1/2"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}"),
        (r"\boxed{5}", "so it is $5$"),
        ("34", "**Answer:** 34"),
        ("12345678901234567890", r"\boxed{12345678901234567891}"),
        ("5", r"\boxed{6}"),
        ("5", ""),
        ("(1,2)", r"\boxed{(1, 2)}"),
        ("x", r"\boxed{\frac{}}"),
        (["4", "-4"], r"\boxed{-4}"),
    ]
    assert scores(config, fence, "math", rows) == [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1]


def test_math_decides_numbers_without_a_process(config: Config) -> None:
    with ProcessFence(1, timeout_s=60.0) as unused:
        assert scores(config, unused, "math", [("5", r"\boxed{5}"), ("5", "Answer: 6"), ("1/2", "Answer: .5")]) == [
            1,
            0,
            1,
        ]
        assert unused.counts()["calls"] == 0


def test_math_grades_and_notes_an_unclosed_thought(config: Config, fence: ProcessFence) -> None:
    [value] = values(config, fence, "math", group_of([("5", r"<think> it is \boxed{5}")]))
    assert value == {"score": 1.0, "answer": "5", "unclosed_think": 1.0}


def test_math_that_does_not_end_is_a_counted_failure(config: Config) -> None:
    with ProcessFence(1, timeout_s=3.0) as impatient:
        rows = [("x", r"\boxed{9^{9^{9^{9^{9^9}}}}+x}"), ("y+x", r"\boxed{x+y}")]
        found = values(config, impatient, "math", group_of(rows))
        assert [value["score"] for value in found] == [0.0, 1.0]
        assert found[0]["failure"] in ("timeout", "memory", "error")
        assert sum(impatient.counts()[kind] for kind in ("timeout", "memory", "error", "crash")) == 1


def test_reward_modules_do_not_import_sympy() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom slime_rl.rollout.rewards import REWARDS\n"
        "[REWARDS.load(name) for name in REWARDS.builtins]\n"
        "sys.exit(any(name in sys.modules for name in ('sympy', 'math_verify', 'torch')))"
    )
    root = Path(__file__).parents[4]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
