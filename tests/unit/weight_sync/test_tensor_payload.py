"""What travels to the engine: handles to shared memory that an unrelated process can open."""

from __future__ import annotations

import base64
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as torch_multiprocessing

from slime_rl.weight_sync import tensor as tensor_transport
from slime_rl.weight_sync.bucket import FlatBuffer
from slime_rl.weight_sync.tensor import allocate_shared, payload

READER = """
import base64, pickle, sys, torch, torch.multiprocessing
content = pickle.loads(base64.b64decode(sys.stdin.read()))
flat = content["flattened_tensor"]
for m in content["metadata"]:
    print(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape).tolist())
"""


def test_an_unrelated_process_reads_the_values() -> None:
    buffer = FlatBuffer(allocate_shared)
    for values in ([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]):  # the second fill goes into the same memory
        flat, slots = buffer.fill([("w", torch.tensor(values)), ("b", torch.tensor([9], dtype=torch.int16))])
        read = subprocess.run(
            [sys.executable, "-c", READER], input=payload(flat, slots), capture_output=True, text=True, check=True
        )
        assert read.stdout.splitlines() == [f"w {values}", "b [9]"]


def test_the_payload_needs_nothing_of_sglang_and_is_small() -> None:
    flat, slots = FlatBuffer(allocate_shared).fill([("w", torch.zeros(100_000))])
    content = base64.b64decode(payload(flat, slots))
    assert b"sglang" not in content
    assert len(content) < 2000


def test_the_process_wide_sharing_strategy_is_left_as_it_was() -> None:
    before = torch_multiprocessing.get_sharing_strategy()
    flat, slots = FlatBuffer(allocate_shared).fill([("w", torch.zeros(4))])
    payload(flat, slots)
    assert torch_multiprocessing.get_sharing_strategy() == before


def test_too_little_shared_memory_is_an_error_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(tensor_transport.os, "statvfs", lambda _: Full())
    with pytest.raises(
        RuntimeError, match="needs 8192 bytes in /dev/shm, where 4096 are free; lower --weight-sync-bucket"
    ):
        allocate_shared(8192, torch.device("cpu"))
