"""An iterator whose next item is made while the last one is still in use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """`items`, one made ahead by a thread; what making it raises is raised when its turn comes."""
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        upcoming = thread.submit(next, items, _END)
        while (item := upcoming.result()) is not _END:
            upcoming = thread.submit(next, items, _END)
            yield item  # type: ignore[misc]
