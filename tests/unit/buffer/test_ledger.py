from __future__ import annotations

import itertools
import json
import random

import pytest

from slime_rl.buffer.ledger import Ledger, State
from slime_rl.buffer.ranges import RangeSet


def test_a_group_goes_from_reserved_to_committed() -> None:
    ledger = Ledger()
    group = ledger.open()
    states = [ledger.state_of(group)]
    for move in (
        lambda: ledger.requeue(group),
        lambda: ledger.reserve(),
        lambda: ledger.generate(group),
        lambda: ledger.admit(0, [group]),
        lambda: ledger.commit(0),
    ):
        move()
        states.append(ledger.state_of(group))
    assert states == ["reserved", "waiting", "reserved", "generated", "admitted", "committed"]
    assert ledger.counts() == {
        **dict.fromkeys(("waiting", "reserved", "generated", "admitted", "dropped"), 0),
        "committed": 1,
    }


def test_waiting_groups_come_back_lowest_first() -> None:
    ledger = Ledger()
    for group in [ledger.open() for _ in range(5)][::-1]:
        ledger.requeue(group)
    assert [ledger.reserve() for _ in range(6)] == [0, 1, 2, 3, 4, None]


@pytest.mark.parametrize(
    ("state", "action", "message"),
    [
        ("generated", "requeue", "cannot requeue group 0: it is generated, and must be reserved"),
        ("generated", "generate", "cannot admit group 0: it is generated"),
        ("reserved", "admit", "cannot take group 0: it is reserved, and must be generated"),
        ("admitted", "drop", "cannot drop group 0: it is admitted, and must be reserved or generated"),
        ("committed", "generate", "cannot admit group 0: it is committed"),
        ("dropped", "requeue", "cannot requeue group 0: it is dropped"),
        ("none", "generate", "cannot admit group 0: it was never reserved"),
    ],
)
def test_ways_that_are_not_in_the_picture_are_refused_with_the_groups_state(
    state: str, action: str, message: str
) -> None:
    ledger = Ledger()
    path = {
        "none": [],
        "reserved": [ledger.open],
        "dropped": [ledger.open, lambda: ledger.drop(0, "x")],
        "generated": [ledger.open, lambda: ledger.generate(0)],
        "admitted": [ledger.open, lambda: ledger.generate(0), lambda: ledger.admit(1, [0])],
        "committed": [ledger.open, lambda: ledger.generate(0), lambda: ledger.admit(1, [0]), lambda: ledger.commit(1)],
    }
    for move in path[state]:
        move()
    actions = {
        "requeue": lambda: ledger.requeue(0),
        "generate": lambda: ledger.generate(0),
        "admit": lambda: ledger.admit(2, [0]),
        "drop": lambda: ledger.drop(0, "y"),
    }
    with pytest.raises(ValueError, match=message):
        actions[action]()


def test_admit_takes_all_groups_or_none() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.open()
    ledger.generate(0)
    with pytest.raises(ValueError, match="cannot take group 1"):
        ledger.admit(0, [0, 1])
    assert ledger.state_of(0) is State.GENERATED
    with pytest.raises(ValueError, match="train a group twice"):
        ledger.admit(0, [0, 0])


def test_a_step_is_committed_once() -> None:
    ledger = Ledger()
    ledger.generate(ledger.open())
    ledger.admit(3, [0])
    with pytest.raises(ValueError, match="step 2 cannot be committed: no groups were taken"):
        ledger.commit(2)
    ledger.commit(3)
    with pytest.raises(ValueError, match="step 3 already is"):
        ledger.commit(3)


def test_committed_history_is_folded_into_ranges() -> None:
    ledger = Ledger()
    for step in range(500):
        groups = [ledger.open() for _ in range(4)]
        for group in groups:
            ledger.generate(group)
        ledger.admit(step, groups)
        ledger.commit(step)
    assert ledger.counts()["committed"] == 2000
    assert ledger.state_dict()["committed"] == [[0, 2000]]
    assert len(json.dumps(ledger.state_dict())) < 400


def test_a_saved_ledger_puts_what_was_under_way_back() -> None:
    ledger = Ledger()
    for _ in range(6):
        ledger.open()
    for group in (0, 1, 2):
        ledger.generate(group)
    ledger.admit(0, [1])
    ledger.drop(4, "bad")
    ledger.requeue(5)
    loaded = Ledger()
    loaded.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert loaded.in_state(State.GENERATED) == [0, 1, 2]
    assert loaded.in_state(State.WAITING) == [3, 5]
    assert loaded.counts()["dropped/bad"] == 1
    assert loaded.open() == 6
    broken = ledger.state_dict()
    broken["next_group_index"] = 9
    with pytest.raises(ValueError, match="accounts for 6 groups, but 9 were opened"):
        Ledger().load_state_dict(broken)


def test_range_set_agrees_with_a_set() -> None:
    rng = random.Random(0)
    values = rng.sample(range(300), 200)
    ranges, plain = RangeSet(), set()
    for value in values:
        ranges.add(value)
        plain.add(value)
        assert len(ranges) == len(plain)
    assert {v for v in range(-1, 301) if v in ranges} == plain
    pairs = ranges.to_list()
    assert all(a[1] < b[0] for a, b in itertools.pairwise(pairs))
    assert RangeSet(pairs).to_list() == pairs
    with pytest.raises(ValueError, match="already"):
        ranges.add(values[0])
