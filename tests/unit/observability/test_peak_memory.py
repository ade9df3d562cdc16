from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import wait_for

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


# Starts a child with memory and ends it, each when it is told. Nobody else's processes come and go below it.
PARENT = f"""
import subprocess, sys
code = "block = bytearray({BLOCK_BYTES}); print('ready', flush=True); input()"
print("started", flush=True)
input()
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
input()
child.kill()
child.wait()
print("gone", flush=True)
input()
"""


def test_memory_of_children_counts_and_the_peak_outlives_them() -> None:
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    try:
        assert parent.stdout.readline() == "started\n"
        before = measure_tree(parent.pid)
        with PeakMemory(pid=parent.pid) as memory:
            print(file=parent.stdin, flush=True)
            assert parent.stdout.readline() == "ready\n"
            inside = measure_tree(parent.pid)
            wait_for(lambda: memory.peak_gib >= BLOCK_BYTES / GIB)  # PSS is not read at every look
            at_peak = memory.peak_gib
            print(file=parent.stdin, flush=True)
            assert parent.stdout.readline() == "gone\n"
            assert measure_tree(parent.pid).num_processes == before.num_processes == 1
    finally:
        parent.kill()
        parent.communicate()
    assert inside.num_processes == 2
    assert inside.rss_bytes - before.rss_bytes >= BLOCK_BYTES
    assert memory.peak_gib >= at_peak


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
    with child_with_memory() as child:
        assert PeakMemory(pid=child.pid).peak_gib == pytest.approx(measure_tree(child.pid).pss_bytes / GIB, rel=0.2)
