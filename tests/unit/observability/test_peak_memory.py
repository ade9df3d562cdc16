from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slime_rl.observability.memory import GIB, PeakMemory, measure_tree

BLOCK_BYTES = 100 * 1024 * 1024


@contextmanager
def child_with_memory() -> Iterator[subprocess.Popen[str]]:
    code = f"block = bytearray({BLOCK_BYTES}); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_memory_of_children_counts_and_the_peak_outlives_them() -> None:
    before = measure_tree(os.getpid())
    with PeakMemory() as memory:
        with child_with_memory():
            inside = measure_tree(os.getpid())
            at_peak = memory.peak_gib
        time.sleep(0.05)
        assert measure_tree(os.getpid()).num_processes == before.num_processes
    assert inside.num_processes == before.num_processes + 1
    assert inside.rss_bytes - before.rss_bytes >= BLOCK_BYTES
    assert memory.peak_gib >= at_peak >= BLOCK_BYTES / GIB


def test_shared_pages_count_once_where_the_system_tells() -> None:
    memory = measure_tree(os.getpid())
    assert 0 < memory.pss_bytes <= memory.rss_bytes


def test_a_process_that_is_gone_weighs_nothing() -> None:
    with child_with_memory() as child:
        pid = child.pid
        assert measure_tree(pid).rss_bytes >= BLOCK_BYTES
    assert measure_tree(pid).num_processes == 0
    assert PeakMemory(pid=pid).peak_gib == 0


def test_thread_ends_with_the_context_and_stop_may_come_twice() -> None:
    with PeakMemory(interval_s=0.01) as memory:
        assert any(thread.name == "peak-memory" for thread in threading.enumerate())
    memory.stop()
    assert not any(thread.name == "peak-memory" for thread in threading.enumerate())


def test_peak_is_known_without_the_thread() -> None:
    assert PeakMemory().peak_gib == pytest.approx(measure_tree(os.getpid()).pss_bytes / GIB, rel=0.2)
