"""The stand-in for Mooncake: memory of one engine gets into that of another."""

from __future__ import annotations

import socket
import struct

import numpy as np

from slime_rl.engine.cpu.transfer import COUNT, PIECE, TransferEngine


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


def session_of(receiver: TransferEngine) -> str:
    return f"127.0.0.1:{receiver.get_rpc_port()}"


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_pieces_arrive_where_they_belong() -> None:
    sender, receiver = engine(), engine()
    source, target = np.arange(5_000_000, dtype=np.int64), np.zeros(5_000_000, dtype=np.int64)
    base, start = address_of(target), address_of(source)
    assert receiver.batch_register_memory([base], [target.nbytes]) == 0
    pieces = [(80, 0, 16), (0, 800, 8), (16_000, 160_000, 24_000_000)]
    sources, targets, lengths = ([*part] for part in zip(*pieces, strict=True))
    moved = sender.batch_transfer_sync_write(
        session_of(receiver), [start + at for at in sources], [base + at for at in targets], lengths
    )
    assert moved == 0
    expected = np.zeros_like(target)
    expected[0:2], expected[100], expected[20_000:3_020_000] = [10, 11], 0, source[2_000:3_002_000]
    assert np.array_equal(target, expected)
    assert sender.transfer_sync_write(session_of(receiver), start + 8, base, 8) == 0 and target[0] == 1


def test_memory_that_is_not_registered_is_left_alone() -> None:
    sender, receiver = engine(), engine()
    source, target = np.ones(16, dtype=np.int64), np.zeros(16, dtype=np.int64)
    base = address_of(target)
    receiver.register_memory(base, 64)
    assert sender.send_probe(session_of(receiver)) == 0
    assert sender.transfer_sync_write(session_of(receiver), address_of(source), base + 32, 64) < 0
    assert not target.any()
    assert sender.transfer_sync_write(session_of(receiver), address_of(source), base, 64) == 0  # on a new connection
    receiver.batch_unregister_memory([base])
    assert sender.transfer_sync_write(session_of(receiver), address_of(source), base, 64) < 0
    assert target.sum() == 8


def test_who_goes_in_the_middle_does_not_disturb_the_others() -> None:
    sender, receiver = engine(), engine()
    target, theirs = np.zeros(1000, dtype=np.int64), np.zeros(1000, dtype=np.int64)
    for array in (target, theirs):  # what was sent whole may be written after the next, by a thread of its own
        receiver.register_memory(address_of(array), array.nbytes)
    host, port = "127.0.0.1", receiver.get_rpc_port()
    head = COUNT.pack(1) + PIECE.pack(address_of(theirs), theirs.nbytes)
    for sent in (head[:3], head, head + bytes(100), head + bytes(theirs.nbytes)):
        with socket.create_connection((host, port)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
            peer.sendall(sent)
    source = np.arange(1000, dtype=np.int64)
    moved = sender.transfer_sync_write(session_of(receiver), address_of(source), address_of(target), source.nbytes)
    assert moved == 0 and np.array_equal(target, source)


def test_an_engine_that_is_gone_is_an_answer() -> None:
    source = np.ones(1, dtype=np.int64)
    sender = engine()
    assert sender.send_probe("127.0.0.1:1") < 0
    assert sender.transfer_sync_write("127.0.0.1:1", address_of(source), address_of(source), 8) < 0
