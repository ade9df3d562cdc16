"""Real engines behind a real router: what they generate is what the weights of the reported version say.

One pair of engines serves all tests; each leaves version and weights as it likes, so each sends its own first.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_config
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.config import Config
from slime_rl.engine.control import EngineControl
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer
from slime_rl.rollout.client import EngineClient, Generation
from slime_rl.rollout.scope import SampleScope, use_scope
from slime_rl.weight_sync.bucket import split_buckets, tied_names
from slime_rl.weight_sync.report import SyncReport
from slime_rl.weight_sync.sender import WeightSender, make_sender

TOLERANCE = 1e-4
SMALL_BUCKETS = 60_000  # several buckets even for the tiny model
WAITS_S = (0.4, 1.0, 2.5, 6.0)  # until all requests are under way and none has ended: longer on a busy machine


@dataclass
class Serving:
    """A router with two engines, and the two sets of weights that are sent to them."""

    config: Config
    models: dict[str, Any]
    engines: list[EngineServer]
    router: RouterProcess

    def send(self, name: str, version: int, sender: WeightSender | None = None, max_bytes: int = 1 << 30) -> SyncReport:
        used = sender or make_sender(self.config, [engine.url for engine in self.engines])
        named = self.models[name].state_dict().items()
        try:
            return used.send(split_buckets(named, max_bytes, tied_names(self.config.model.hf_checkpoint)), version)
        finally:
            if sender is None:
                used.close()

    def log_probs(self, name: str, prompt: list[int], tokens: list[int]) -> list[float]:
        """Of `tokens` after `prompt` under transformers."""
        ids = prompt + tokens
        with torch.no_grad():
            table = self.models[name](torch.tensor([ids])).logits[0].log_softmax(-1)
        return [table[len(prompt) + i - 1, token].item() for i, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("serving")
    paths = {name: write_tiny_checkpoint(folder / name, seed=seed) for seed, name in enumerate("AB")}
    models = {name: AutoModelForCausalLM.from_pretrained(path).float() for name, path in paths.items()}
    flags = ("--hf-checkpoint", str(paths["A"]), "--max-prompt-len", "64", "--max-response-len", "512")
    config = make_config(folder, *flags, "--router-policy", "round_robin")
    engines = [EngineServer(config, index, config.run_dir) for index in range(2)]
    router = RouterProcess(config, config.run_dir)
    try:
        router.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineServer.start, engines))
        for engine in engines:
            router.add_worker(engine.url)
        yield Serving(config, models, engines, router)
    finally:
        for engine in engines:
            engine.stop()
        router.stop()


def generate(
    serving: Serving,
    num_requests: int,
    num_tokens: int,
    meanwhile: Callable[[], object] | None = None,
    wait_s: float = 0.0,
) -> list[tuple[list[int], Generation]]:
    """(prompt, answer) of requests that run together through the router; `meanwhile` runs in a thread after a while."""
    source = random.Random(0)
    prompts = [[source.randrange(3, 98) for _ in range(10)] for _ in range(num_requests)]
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}

    async def run() -> list[Generation]:
        async with EngineClient(serving.router.url, max_in_flight=64, timeout_s=600) as client:
            tasks = [asyncio.create_task(client.generate(prompt, sampling)) for prompt in prompts]
            if meanwhile is not None:
                await asyncio.sleep(wait_s)
                await asyncio.to_thread(meanwhile)
            return await asyncio.gather(*tasks)

    return list(zip(prompts, asyncio.run(run()), strict=True))


def gap(
    serving: Serving, name: str, prompt: list[int], answer: Generation, start: int = 0, end: int | None = None
) -> float:
    """Largest difference between engine and transformers over tokens [start, end)."""
    expected = serving.log_probs(name, prompt, answer.tokens)
    pairs = list(zip(answer.log_probs, expected, strict=True))[start:end]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def test_engines_start_with_version_0_and_the_checkpoints_weights(serving: Serving) -> None:
    for prompt, answer in generate(serving, 4, 16):
        assert answer.versions == [0] * 16
        assert gap(serving, "A", prompt, answer) < TOLERANCE
    assert serving.router.workers() == {engine.url: True for engine in serving.engines}


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk", "disk-delta"])
def test_new_weights_are_served_by_every_engine(serving: Serving, transport: str) -> None:
    flags = ("--hf-checkpoint", serving.config.model.hf_checkpoint, "--weight-sync", transport)
    folder = serving.config.run_dir / transport
    sender = make_sender(make_config(folder, *flags), [engine.url for engine in serving.engines])
    num_bytes = sum(tensor.nbytes for tensor in serving.models["B"].state_dict().values())
    try:
        for version, name, max_bytes in ((1, "B", 1 << 30), (2, "A", SMALL_BUCKETS), (3, "B", SMALL_BUCKETS)):
            report = serving.send(name, version, sender, max_bytes)
            assert report.version == version
            assert report.updated == [engine.url for engine in serving.engines]
            if not transport.startswith("disk"):
                assert report.num_bytes == num_bytes
            for prompt, answer in generate(serving, 4, 16):
                assert answer.versions == [version] * 16
                assert gap(serving, name, prompt, answer) < TOLERANCE
    finally:
        sender.close()
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")] == []


def test_engines_with_equal_weights_have_equal_checksums(serving: Serving) -> None:
    async def checksums() -> list[str]:
        found = []
        for engine in serving.engines:
            async with EngineControl(engine.url) as control:
                found.append(await control.checksum())
        return found

    serving.send("A", 4)
    first = asyncio.run(checksums())
    serving.send("B", 5)
    second = asyncio.run(checksums())
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_requests_in_flight_go_on_with_the_new_weights(serving: Serving) -> None:
    num_tokens, most = 400, 0
    for number, wait_s in enumerate((*WAITS_S, 0.1)):
        before, after = 1000 + 2 * number, 1001 + 2 * number
        serving.send("A", before)
        answers = generate(serving, 24, num_tokens, lambda after=after: serving.send("B", after), wait_s)
        assert len(answers) == 24
        switched = 0
        for prompt, answer in answers:
            assert len(answer.tokens) == num_tokens and answer.finish_reason == "length"
            assert answer.versions == sorted(answer.versions) and set(answer.versions) <= {before, after}
            switch = answer.versions.count(before)
            switched += 0 < switch < num_tokens
            assert gap(serving, "A", prompt, answer, end=switch) < TOLERANCE
            assert gap(serving, "B", prompt, answer, start=switch) < TOLERANCE
        if switched >= 16:
            return
        most = max(most, switched)
    pytest.fail(f"only {most} requests were in flight during the update")


def interrupted(serving: Serving, wait: Callable[[], object]) -> list[Generation]:
    """Answers of 8 requests that are interrupted after `wait`."""
    scopes = [SampleScope() for _ in range(8)]

    async def run() -> list[Generation]:
        async with EngineClient(serving.router.url, max_in_flight=64, timeout_s=600) as client:
            tasks = []
            for scope in scopes:
                with use_scope(scope):
                    sampling = {"max_new_tokens": 500, "temperature": 1.0, "ignore_eos": True}
                    tasks.append(asyncio.create_task(client.generate([5, 6, 7], sampling)))
            await asyncio.to_thread(wait)
            for scope in scopes:
                scope.interrupt(0.0)
            await client.abort([request_id for scope in scopes for request_id in scope.requests])
            return await asyncio.gather(*tasks)

    return asyncio.run(run())


def test_aborted_requests_answer_at_once_with_what_they_have(serving: Serving) -> None:
    serving.send("A", 15)
    partial: list[Generation] = []
    for wait_s in WAITS_S:
        answers = interrupted(serving, lambda wait_s=wait_s: time.sleep(wait_s))
        partial = [answer for answer in answers if 0 < len(answer.tokens) < 500]
        if len(partial) >= 4:
            break
    assert {answer.finish_reason for answer in answers} == {"abort"} and len(partial) >= 4
    for answer in partial:
        assert answer.versions == [15] * len(answer.tokens)
        assert gap(serving, "A", [5, 6, 7], answer) < TOLERANCE


def test_requests_that_are_aborted_during_an_update_end_and_the_update_is_whole(serving: Serving) -> None:
    serving.send("A", 16)
    under_way = threading.Event()

    def slow_buckets() -> Iterator[Any]:
        for bucket in split_buckets(list(serving.models["B"].state_dict().items()), SMALL_BUCKETS):
            yield bucket
            under_way.set()
            time.sleep(0.2)

    sender = make_sender(serving.config, [engine.url for engine in serving.engines])
    with ThreadPoolExecutor(1) as pool:
        updates = []

        def begin_update() -> None:
            time.sleep(0.3)
            updates.append(pool.submit(sender.send, slow_buckets(), 17))
            assert under_way.wait(120)

        answers = interrupted(serving, begin_update)
        report = updates[0].result(120)
    sender.close()
    assert {answer.finish_reason for answer in answers} == {"abort"}
    for answer in answers:
        assert answer.versions == [16] * len(answer.tokens)
        assert gap(serving, "A", [5, 6, 7], answer) < TOLERANCE
    assert report.updated == [engine.url for engine in serving.engines]
    for prompt, answer in generate(serving, 4, 16):
        assert answer.versions == [17] * 16
        assert gap(serving, "B", prompt, answer) < TOLERANCE


def test_old_prefixes_are_not_reused_after_an_update(serving: Serving) -> None:
    for version, name in ((20, "A"), (21, "B")):
        serving.send(name, version)
        for _ in range(2):  # the second time the prompts' prefixes are in the cache
            for prompt, answer in generate(serving, 4, 8):
                assert gap(serving, name, prompt, answer) < TOLERANCE


def test_an_update_that_breaks_off_leaves_no_number_as_version(serving: Serving) -> None:
    serving.send("A", 30)

    def broken() -> Iterator[Any]:
        yield from split_buckets(list(serving.models["B"].state_dict().items())[:3], SMALL_BUCKETS)
        raise OSError("the trainer lost a tensor")

    sender = make_sender(serving.config, [engine.url for engine in serving.engines])
    with pytest.raises(OSError, match="lost a tensor"):
        sender.send(broken(), 31)
    sender.close()

    async def versions_then_recover() -> list[str]:
        found = []
        for engine in serving.engines:
            async with EngineControl(engine.url) as control:
                found.append(await control.weight_version())
                await control.end_weight_update()
                await control.resume_generation()
        return found

    assert asyncio.run(versions_then_recover()) == ["31-incomplete"] * 2
    serving.send("A", 32)  # a whole update makes them good again
    for prompt, answer in generate(serving, 2, 8):
        assert answer.versions == [32] * 8
        assert gap(serving, "A", prompt, answer) < TOLERANCE


def test_logs_lie_in_the_run_folder(serving: Serving) -> None:
    logs = Path(serving.config.run_dir) / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["engine_0.log", "engine_1.log", "router.log"]


def test_an_engine_that_dies_of_a_bad_tensor_is_reported(serving: Serving) -> None:
    """Last: SGLang ends when a tensor has a shape that does not fit."""
    url = serving.engines[0].url
    sender = make_sender(serving.config, [url])
    try:
        report = sender.send(iter([[("model.norm.weight", torch.zeros(7))]]), 60)
    finally:
        sender.close()
    assert report.updated == [] and f"{url}/update_weights_from_tensor" in report.failed[url]
