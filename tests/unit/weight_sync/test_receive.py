"""What the receiver inside an engine makes of the instructions of each transport, without an engine in between."""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_rl.engine.control import EngineRefused
from slime_rl.weight_sync.bucket import split_buckets
from slime_rl.weight_sync.files import DiskTransport
from slime_rl.weight_sync.instructions import Instruction
from slime_rl.weight_sync.receive import Receiver, load
from slime_rl.weight_sync.sender import BucketSender, Transport
from slime_rl.weight_sync.session import EngineSession
from slime_rl.weight_sync.tensor import TensorTransport

Weights = dict[str, Tensor]


class ReceivingEngine:
    """Stands where an EngineControl does and has a model; it runs the real receiver. `followed`: it has had a line."""

    def __init__(self, url: str, ranks: int = 1) -> None:
        self.url, self.version, self.ranks, self.followed = url, "0", ranks, False
        self.weights: Weights = {}
        self.num_loaded = 0

    def load_weights(self, named: Any) -> None:
        for name, tensor in named:
            self.weights[name] = tensor.clone()
            self.num_loaded += 1

    async def num_ranks(self, *, anew: bool = False) -> int:
        return self.ranks

    async def update_by_instruction(self, payload: str) -> None:
        named = pickle.loads(base64.b64decode(payload))
        self.followed |= Instruction.from_text(named[0][0]).kind == "follow"
        try:
            await asyncio.to_thread(load, self, named)
        except ValueError as error:
            raise EngineRefused(str(error)) from error

    async def set_weight_version(self, version: str) -> None:
        self.version = version

    async def weight_version(self) -> str:
        return self.version

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def nothing(*_: Any) -> None: ...

        return nothing


def make(
    make_transport: Callable[[EngineSession], Transport], *urls: str, ranks: Sequence[int] = (1, 1)
) -> tuple[BucketSender, Any]:
    session = EngineSession(urls, timeout_s=1)
    engines = {url: ReceivingEngine(url, size) for url, size in zip(urls, ranks, strict=False)}
    session.controls = list(engines.values())  # type: ignore[arg-type]
    session._known = dict(engines)  # type: ignore[arg-type]
    return BucketSender(session, make_transport(session), "retract"), engines


def some_weights(seed: int) -> Weights:
    source = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(300, 70, generator=source),
        "half": torch.randn(1000, generator=source).to(torch.bfloat16),
        "one": torch.randn((), generator=source),
    }


def send(sender: BucketSender, weights: Weights, version: int) -> Any:
    return sender.send(split_buckets(weights.items(), 50_000), version)


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


TRANSPORTS = {
    "tensor": lambda folder: TensorTransport,
    "disk": lambda folder: lambda session: DiskTransport(session, folder, deltas=False),
    "disk-delta": lambda folder: lambda session: DiskTransport(session, folder, deltas=True),
}


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_weights_arrive_bit_for_bit_at_every_engine(name: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    sender, engines = make(TRANSPORTS[name](tmp_path), "http://a", "http://b", ranks=ranks)
    for version in (1, 2, 3):
        weights = some_weights(version)
        report = send(sender, weights, version)
        assert report.updated == ["http://a", "http://b"]
        for engine in engines.values():
            assert engine.version == str(version)
            assert_same(engine.weights, weights)
            assert engine.followed == (name == "tensor" and engine.ranks == 1)
    assert list(tmp_path.iterdir()) == []
    sender.close()


def nudged(weights: Weights) -> Weights:
    """One value in a hundred changed by a little."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in result.values():
        tensor.view(-1)[::100] *= 1.01
    return result


def test_a_delta_holds_only_what_changed(tmp_path: Path) -> None:
    sender, engines = make(TRANSPORTS["disk-delta"](tmp_path), "http://a")
    first = some_weights(1)
    whole = send(sender, first, 1)
    second = nudged(first)
    second["half"] = first["half"]
    report = send(sender, second, 2)
    assert_same(engines["http://a"].weights, second)
    assert whole.changed_share == 1.0
    assert report.changed_share == pytest.approx(211 / 22001)
    assert report.num_bytes < 0.05 * whole.num_bytes
    assert engines["http://a"].num_loaded == 3 + 2, "an unchanged tensor was loaded"
    sender.close()


def test_a_new_engine_gets_everything_and_then_deltas(tmp_path: Path) -> None:
    sender, engines = make(TRANSPORTS["disk-delta"](tmp_path), "http://a", "http://b")
    send(sender, some_weights(1), 1)
    new = ReceivingEngine("http://c")
    sender.engines._known["http://c"] = new  # type: ignore[assignment]
    sender.connect(["http://c"])
    assert send(sender, some_weights(1), 1).changed_share == 1.0
    assert_same(new.weights, some_weights(1))
    sender.engines._known |= engines
    sender.engines.controls = [engines["http://a"], engines["http://b"], new]  # type: ignore[list-item]
    second = nudged(some_weights(1))
    assert send(sender, second, 2).changed_share < 0.02
    for engine in (*engines.values(), new):
        assert_same(engine.weights, second)
    sender.close()


def test_after_an_update_that_broke_off_everything_is_sent(tmp_path: Path) -> None:
    sender, engines = make(TRANSPORTS["disk-delta"](tmp_path), "http://a")
    send(sender, some_weights(1), 1)

    def broken() -> Any:
        yield next(split_buckets(nudged(some_weights(1)).items(), 50_000))
        raise OSError("lost a tensor")

    with pytest.raises(OSError, match="lost a tensor"):
        sender.send(broken(), 2)
    assert send(sender, some_weights(2), 2).changed_share == 1.0
    assert_same(engines["http://a"].weights, some_weights(2))
    sender.close()


class Posts:
    """An EngineSession that only remembers the payloads."""

    def __init__(self) -> None:
        self.controls = [ReceivingEngine("http://a")]
        self.payloads: list[str] = []

    def start(self, action: Any) -> Future[Any]:
        import asyncio

        class Noting:
            async def update_by_instruction(_, payload: str) -> None:
                self.payloads.append(payload)

        asyncio.run(action(Noting(), 0))
        done: Future[Any] = Future()
        done.set_result(None)
        return done


def posted(transport: Any, posts: Posts, weights: Weights, version: int) -> str:
    transport.begin(version)
    flat, slots = transport.make_buffer().fill(list(weights.items()))
    transport.post(flat, slots)
    return posts.payloads[-1]


def receive(receiver: Receiver, payload: str) -> Weights:
    ((text, _),) = pickle.loads(base64.b64decode(payload))
    return dict(receiver.tensors(Instruction.from_text(text)))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    posts = Posts()
    payload = posted(DiskTransport(posts, tmp_path, deltas=False), posts, some_weights(1), 1)  # type: ignore[arg-type]
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"v1_0\.safetensors: checksum [0-9a-f]{8} where [0-9a-f]{8} was sent"):
        receive(Receiver(), payload)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"bytes, .* were written"):
        receive(Receiver(), payload)


class Refusing(ReceivingEngine):
    """Takes a bucket, then no more."""

    def load_weights(self, named: Any) -> None:
        if self.num_loaded:
            raise ValueError("no such parameter")
        super().load_weights(named)


def test_an_engine_that_refuses_in_the_middle_is_left_out_with_its_reason() -> None:
    sender, engines = make(TensorTransport, "http://a", "http://b")
    bad = Refusing("http://b")
    sender.engines.controls[1] = sender.engines._known["http://b"] = bad  # type: ignore[assignment]
    report = send(sender, some_weights(1), 1)
    assert report.updated == ["http://a"] and report.failed == {"http://b": "no such parameter"}
    assert_same(engines["http://a"].weights, some_weights(1))
    assert bad.version == "1-incomplete"
    sender.connect(["http://a"])
    assert send(sender, some_weights(2), 2).updated == ["http://a"]
    sender.close()


def test_an_engine_stops_following_a_trainer_that_leaves() -> None:
    sender, engines = make(TensorTransport, "http://a")
    heard: list[str] = []
    inner = engines["http://a"].update_by_instruction

    async def listen(payload: str) -> None:
        following = asyncio.ensure_future(inner(payload))
        following.add_done_callback(lambda task: heard.append(f"ended, error: {task.exception()}"))
        await asyncio.shield(following)

    engines["http://a"].update_by_instruction = listen

    def broken() -> Any:
        yield [("wide", some_weights(1)["wide"])]
        yield [("half", some_weights(1)["half"])]
        raise RuntimeError("gathering failed")

    with pytest.raises(RuntimeError, match="gathering failed"):
        sender.send(broken(), 1)
    assert heard == [] and engines["http://a"].version == "1-incomplete"
    sender.transport.close()
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard == ["ended, error: None"]
    sender.close()


def test_a_delta_on_another_version_is_refused(tmp_path: Path) -> None:
    posts = Posts()
    transport = DiskTransport(posts, tmp_path, deltas=True)  # type: ignore[arg-type]
    whole = posted(transport, posts, some_weights(1), 1)
    receiver = Receiver()
    receive(receiver, whole)
    transport.end()
    delta = posted(transport, posts, nudged(some_weights(1)), 2)
    with pytest.raises(ValueError, match="changes version 1, but this engine has None"):
        receive(Receiver(), delta)
    receiver._kept["wide"][0, 0] += 1
    with pytest.raises(ValueError, match=r"wide: checksum .* after the delta"):
        receive(receiver, delta)


def test_memory_that_was_filled_anew_too_early_is_noticed() -> None:
    transport = TensorTransport(Posts())  # type: ignore[arg-type]
    buffer = transport.make_buffer()
    payload = transport._instruction(*buffer.fill(list(some_weights(1).items()))).to_payload()
    buffer.fill(list(some_weights(2).items()))
    with pytest.raises(ValueError, match="shared memory: checksum"):
        receive(Receiver(), payload)
    transport.close()
