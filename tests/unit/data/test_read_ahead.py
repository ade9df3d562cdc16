"""Items come in order, one is made ahead, and what making one raises comes in its turn."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from slime_rl.data.read_ahead import read_ahead


def test_every_item_in_order_and_none_is_an_item() -> None:
    assert list(read_ahead(iter([3, None, 1, 2]))) == [3, None, 1, 2]
    assert list(read_ahead(iter(()))) == []


def test_one_item_is_made_ahead_and_no_more() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(5):
            made.append(i)
            yield i

    ahead = read_ahead(items())
    assert next(ahead) == 0
    end = time.monotonic() + 10
    while made != [0, 1] and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)
    assert made == [0, 1]
    ahead.close()  # type: ignore[attr-defined]
    assert made == [0, 1]


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the second is damaged")

    ahead = read_ahead(items())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="the second is damaged"):
        next(ahead)
