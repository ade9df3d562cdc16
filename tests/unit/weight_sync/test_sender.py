"""The order of one weight update, and what is left when it breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_rl.engine.control import EngineError, EngineRefused
from slime_rl.weight_sync.bucket import Bucket, FlatBuffer, Slot
from slime_rl.weight_sync.sender import BucketSender
from slime_rl.weight_sync.session import EngineSession


class RecordingEngine:
    """Stands where an EngineControl does; every method notes its call. `reported` is the version it claims to have."""

    def __init__(self, log: list[Any], url: str = "http://engine") -> None:
        self.log, self.url = log, url
        self.version = "0"

    def __getattr__(self, name: str) -> Any:
        async def note(*arguments: Any) -> None:
            self.log.append((name, *arguments))

        return note

    async def num_ranks(self, *, anew: bool = False) -> int:
        self.log.append(("num ranks, anew", anew))
        return 1

    async def set_weight_version(self, version: str) -> None:
        self.log.append(("version", version))
        self.version = version

    async def weight_version(self) -> str:
        return self.version


class RecordingTransport:
    """Copies what it is given; a bucket arrives when the test, or the sender by waiting, lets it."""

    changed_share, room = 1.0, 1

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def begin(self, version: int) -> None:
        self.log.append(("begin", version))

    def end(self) -> None:
        self.log.append(("end",))

    def make_buffer(self) -> FlatBuffer:
        return FlatBuffer(lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def post(self, flat: Tensor, slots: list[Slot]) -> tuple[Future[Any], int]:
        self.log.append(("post", [slot.name for slot in slots]))
        future: Future[Any] = Future()
        future.set_result(None)
        return future, flat.numel()

    def engines_changed(self) -> None:
        self.log.append(("engines changed",))

    def close(self) -> None:
        self.log.append(("transport closed",))


def make(mode: Any = "retract", external: bool = False) -> tuple[BucketSender, list[Any], RecordingEngine]:
    log: list[Any] = []
    session = EngineSession(["http://engine"], timeout_s=1, external=external)
    engine = RecordingEngine(log)
    session.controls = [engine]  # type: ignore[list-item]
    session._known = {engine.url: engine}  # type: ignore[dict-item]
    return BucketSender(session, RecordingTransport(log), mode), log, engine


def buckets(*names: str) -> Iterator[Bucket]:
    return iter([[(name, torch.zeros(2))] for name in names])


def test_an_update_takes_its_steps_in_order() -> None:
    sender, log, _ = make()
    report = sender.send(buckets("a", "b"), 3)
    assert log == [
        ("num ranks, anew", False),
        ("pause", "retract"),
        ("begin_weight_update",),
        ("version", "3-incomplete"),
        ("begin", 3),
        ("post", ["a"]),
        ("post", ["b"]),
        ("end",),
        ("end_weight_update",),
        ("flush_cache",),
        ("version", "3"),
        ("resume_generation",),
    ]
    assert (report.version, report.num_tensors, report.num_bytes) == (3, 2, 16)
    sender.close()
    assert log[-2:] == [("transport closed",), ("close",)]


def test_servers_of_others_are_asked_for_their_size_at_every_update() -> None:
    sender, log, _ = make(external=True)
    for version in (1, 2):
        sender.send(buckets("a"), version)
    assert [entry for entry in log if entry[0] == "num ranks, anew"] == [("num ranks, anew", True)] * 2
    sender.close()


def test_in_place_updates_do_not_flush() -> None:
    sender, log, _ = make("in_place")
    sender.send(buckets("a"), 3)
    assert ("pause", "in_place") in log
    assert ("flush_cache",) not in log
    sender.close()


def test_the_next_bucket_is_taken_while_one_travels() -> None:
    sender, log, _ = make()

    def noted() -> Iterator[Bucket]:
        for name in "abc":
            log.append(("take", name))
            yield [(name, torch.zeros(2))]

    sender.send(noted(), 1)
    order = [entry for entry in log if entry[0] in ("take", "post")]
    assert order == [("take", "a"), ("post", ["a"]), ("take", "b"), ("post", ["b"]), ("take", "c"), ("post", ["c"])]
    sender.close()


def test_a_failure_leaves_the_engines_paused_with_a_version_that_is_no_number() -> None:
    sender, log, engine = make()

    def broken() -> Iterator[Bucket]:
        yield from buckets("a")
        raise OSError("lost a tensor")

    with pytest.raises(OSError, match="lost a tensor"):
        sender.send(broken(), 3)
    assert engine.version == "3-incomplete"
    assert ("resume_generation",) not in log
    sender.close()


def test_an_update_without_tensors_is_an_error() -> None:
    sender, _, _ = make()
    with pytest.raises(ValueError, match="version 3 has no tensors"):
        sender.send(buckets(), 3)
    sender.close()


def test_an_engine_that_reports_another_version_is_named() -> None:
    sender, log, engine = make()

    async def forgetful(version: str) -> None:
        log.append(("version", version))

    engine.set_weight_version = forgetful  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"version 3: engines report other versions: \{'http://engine': '0'\}"):
        sender.send(buckets("a"), 3)
    assert ("resume_generation",) not in log
    sender.close()


def test_a_sender_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        EngineSession([], timeout_s=1)


def two_engines() -> tuple[BucketSender, list[RecordingEngine]]:
    session = EngineSession(["http://a", "http://b"], timeout_s=1)
    engines = [RecordingEngine([], url) for url in ("http://a", "http://b")]
    session.controls = list(engines)  # type: ignore[arg-type]
    session._known = {engine.url: engine for engine in engines}  # type: ignore[misc]
    return BucketSender(session, RecordingTransport([]), "retract"), engines


def fails_with(error: Exception) -> Any:
    async def fail(*_: Any) -> None:
        raise error

    return fail


def test_an_engine_that_is_lost_is_left_out_and_the_others_get_the_weights() -> None:
    sender, (lost, sound) = two_engines()
    lost.end_weight_update = fails_with(EngineError("gone"))  # type: ignore[attr-defined]
    report = sender.send(buckets("a", "b"), 3)
    assert report.updated == ["http://b"] and report.failed == {"http://a": "gone"}
    assert sound.version == "3" and ("resume_generation",) in sound.log
    assert lost.version == "3-incomplete" and ("resume_generation",) not in lost.log
    sender.close()


def test_when_all_engines_are_lost_the_weights_are_still_taken_to_the_end() -> None:
    sender, engines = two_engines()
    for engine in engines:
        engine.begin_weight_update = fails_with(EngineError("gone"))  # type: ignore[attr-defined]
    rest = buckets("a", "b")
    report = sender.send(rest, 3)
    assert report.updated == [] and set(report.failed) == {"http://a", "http://b"}
    assert list(rest) == []
    sender.close()


def test_weights_that_every_engine_refuses_are_an_error() -> None:
    sender, engines = two_engines()
    for engine in engines:
        engine.begin_weight_update = fails_with(EngineRefused("no such parameter"))  # type: ignore[attr-defined]
    with pytest.raises(EngineRefused, match="no such parameter"):
        sender.send(buckets("a"), 3)
    sender.close()


def test_other_engines_can_be_named_between_updates() -> None:
    sender, (_, sound) = two_engines()
    sender.connect(["http://b"])
    assert sender.send(buckets("a"), 4).updated == ["http://b"]
    assert sound.version == "4"
    sender.close()
