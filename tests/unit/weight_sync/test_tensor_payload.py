"""What travels to the engine: handles to memory that an unrelated process can open, and that leaves no name behind."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys

import torch

from slime_rl.weight_sync.bucket import Bucket, FlatBuffer
from slime_rl.weight_sync.tensor import TensorTransport

READER = """
import base64, pickle, sys
from slime_rl.weight_sync.instructions import Instruction
from slime_rl.weight_sync.receive import Receiver
receiver = Receiver()
for line in sys.stdin:
    ((text, _),) = pickle.loads(base64.b64decode(line))
    for name, tensor in receiver.tensors(Instruction.from_text(text)):
        print(name, str(tensor.dtype), tensor.tolist(), flush=True)
print(len(receiver._maps))
"""


def payload(transport: TensorTransport, buffer: FlatBuffer, bucket: Bucket) -> str:
    return transport._instruction(*buffer.fill(bucket)).to_payload()


def test_an_unrelated_process_reads_the_values_and_maps_the_memory_once() -> None:
    transport = TensorTransport(engines=None)  # type: ignore[arg-type]
    buffer = transport.make_buffer()
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    for values in ([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]):  # the second fill goes into the same memory
        bucket = [("w", torch.tensor(values)), ("b", torch.tensor([9], dtype=torch.int16))]
        print(payload(transport, buffer, bucket), file=reader.stdin, flush=True)
        lines = [reader.stdout.readline().strip() for _ in range(2)]
        assert lines == [f"w torch.float32 {values}", "b torch.int16 [9]"]
    rest, _ = reader.communicate(timeout=300)
    assert rest == "1\n" and reader.returncode == 0
    transport.close()


def test_the_payload_is_small_and_names_nothing_of_ours_to_unpickle() -> None:
    transport = TensorTransport(engines=None)  # type: ignore[arg-type]
    content = base64.b64decode(payload(transport, transport.make_buffer(), [("w", torch.zeros(100_000))]))
    assert b"sglang" not in content and b"slime_rl" not in content
    assert len(content) < 2000
    ((_, carrier),) = pickle.loads(content)
    assert carrier.numel() == 1
    transport.close()


def open_memory() -> list[str]:
    """Descriptors of this process that are memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the list itself, or another thread's
            if any(kind in os.readlink(f"/proc/self/fd/{name}") for kind in ("memfd:", "/dev/shm/")):
                found.append(name)
    return found


def test_closing_gives_the_memory_back_and_nothing_lies_in_dev_shm() -> None:
    before, shared_before = open_memory(), set(os.listdir("/dev/shm"))
    transport = TensorTransport(engines=None)  # type: ignore[arg-type]
    buffer = transport.make_buffer()
    payload(transport, buffer, [("w", torch.zeros(1000))])
    payload(transport, buffer, [("w", torch.zeros(100_000))])  # grows
    assert f"torch_{os.getpid()}_" not in " ".join(set(os.listdir("/dev/shm")) - shared_before)
    assert len(open_memory()) > len(before)
    transport.close()
    del buffer
    assert open_memory() == before
