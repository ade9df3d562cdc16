"""Engines of one policy with one rank and with two: both get the weights, serve, and are replaced by their like."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_runs import LIMIT_S, base_flags, server_with, start_train, train_metrics
from factories import make_config
from processes import wait_for
from served import generate
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.engine.control import EngineControl
from slime_rl.engine.server import EngineServer
from slime_rl.rollout.client import Generation
from slime_rl.weight_sync.bucket import split_buckets
from slime_rl.weight_sync.sender import make_sender

TOLERANCE = 1e-4
SIZES = (2, 1)  # the engine of two ranks first, so that numbering by the first one's size is seen
Serving = tuple[list[str], dict[str, Path]]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """URLs of an engine of each size that serve model A, and the folders of two models."""
    folder = tmp_path_factory.mktemp("sizes")
    paths = {name: write_tiny_checkpoint(folder / name, seed=seed) for seed, name in enumerate("AB")}
    flags = ("--hf-checkpoint", str(paths["A"]), "--max-prompt-len", "64", "--max-response-len", "64")
    configs = [make_config(folder, *flags, "--rollout-num-gpus-per-engine", str(size)) for size in SIZES]
    engines = [EngineServer(config, index, config.run_dir) for index, config in enumerate(configs)]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineServer.start, engines))
        yield [engine.url for engine in engines], paths
    finally:
        for engine in engines:
            engine.stop()


def gap(model: Any, prompt: list[int], answer: Generation) -> float:
    """Largest difference between an engine's log-probs and transformers'."""
    with torch.no_grad():
        table = model(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
    expected = [table[len(prompt) + i - 1, token].item() for i, token in enumerate(answer.tokens)]
    return max(abs(a - b) for a, b in zip(answer.log_probs, expected, strict=True))


def ranks_and_checksum(url: str) -> tuple[int, str]:
    async def ask() -> tuple[int, str]:
        async with EngineControl(url) as control:
            return await control.num_ranks(), await control.checksum()

    return asyncio.run(ask())


def test_every_transport_brings_the_same_bits_to_both(serving: Serving, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    urls, paths = serving
    models = {name: AutoModelForCausalLM.from_pretrained(path).float() for name, path in paths.items()}
    loaded = [ranks_and_checksum(url) for url in urls]
    assert tuple(ranks for ranks, _ in loaded) == SIZES
    sums: dict[str, set[Any]] = {"A": {tuple(loaded)}, "B": set()}
    version = 0
    for transport in ("tensor", "distributed", "disk", "disk-delta"):
        flags = ("--hf-checkpoint", str(paths["A"]), "--weight-sync", transport)
        sender = make_sender(make_config(tmp_path, *flags), urls)
        try:
            for name, max_bytes in (("B", 1 << 30), ("A", 60_000)):
                version += 1
                report = sender.send(split_buckets(models[name].state_dict().items(), max_bytes), version)
                assert report.updated == urls, report.failed
                for url in urls:
                    for prompt, answer in generate(url):
                        assert answer.versions == [version] * 16
                        assert gap(models[name], prompt, answer) < TOLERANCE
                sums[name].add(tuple(ranks_and_checksum(url) for url in urls))
        finally:
            sender.close()
    assert [len(found) for found in sums.values()] == [1, 1] and sums["A"] != sums["B"]


def test_a_run_trains_with_both_and_takes_the_only_one_of_its_size_back(quickstart_data: Path, tmp_path: Path) -> None:
    groups = [{"num_gpus": 1}, {"num_gpus": 2, "num_gpus_per_engine": 2}]
    serving, run_dir, log = tmp_path / "serving.yaml", tmp_path / "run", tmp_path / "log"
    serving.write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": groups}]}))
    flags = ["--sglang-config", str(serving), "--weight-sync", "distributed", "--num-steps", "10000"]
    flags += ["--reward-function-path", "run_plugins:every_second", "--log-samples", "16"]
    flags += ["--engine-health-interval-s", "0.5"]
    driver = start_train([*base_flags(quickstart_data, run_dir), *flags], log)

    def wait(condition: Any) -> None:
        def holds() -> object:
            assert driver.poll() is None, log.read_text()
            return condition()

        wait_for(holds, LIMIT_S)

    def steps() -> int:
        return len(train_metrics(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0

    faults, own_log = run_dir / "logs" / "faults.log", run_dir / "logs" / "engine_0.log"
    try:
        wait(lambda: steps() >= 2)
        server_with("--tp-size=1", driver.pid).kill()
        wait(lambda: faults.exists() and "engine 0 serves again" in faults.read_text())
        before = steps()
        wait(lambda: steps() >= before + 2 and "Prefill batch" in own_log.read_text())
    finally:
        driver.send_signal(signal.SIGTERM)
        code = driver.wait(timeout=LIMIT_S)
    assert code == 128 + signal.SIGTERM
    metrics = train_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(len(metrics)))
    assert all(line["train/grad_norm"] > 0 and line["train/logprob_diff_max_abs"] < TOLERANCE for line in metrics)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert all(set(line["weight_versions"]) == {line["step"]} for line in samples)
    said = faults.read_text()
    assert "engine 0 answers again" in said and "it gets no traffic before it has current weights" in said
    assert "engine 1" not in said
    assert (run_dir / "logs" / "engine_0.1.log").exists() and not (run_dir / "logs" / "engine_1.1.log").exists()
