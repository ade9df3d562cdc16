"""A pure refactor reproduces the stored curves; a rerun reproduces itself to the bit."""

from __future__ import annotations

import pytest
from curves import CURVES, STEPS, TOLERANCE, read_curve, run_curve


@pytest.mark.parametrize("name", list(CURVES))
def test_curve_is_the_stored_one_and_a_rerun_is_exact(name: str) -> None:
    first, again, stored = run_curve(name), run_curve(name, steps=6), read_curve(name)
    assert first[:6] == again
    assert len(stored) == STEPS
    for step, (line, wanted) in enumerate(zip(first, stored, strict=True)):
        assert line == pytest.approx(wanted, **TOLERANCE), f"step {step}"


@pytest.mark.parametrize(("name", "metric", "below"), [("sft", "train/loss", 0.85), ("ppo", "train/value_loss", 0.2)])
def test_stored_curves_learn(name: str, metric: str, below: float) -> None:
    """The stored numbers are of runs that work: what is minimised directly falls clearly."""
    curve = [line[metric] for line in read_curve(name)]
    assert min(curve[-3:]) < below * curve[0]
