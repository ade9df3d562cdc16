"""The manager with the real buffer and production; only Ray's object store is left out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.conformance import fill
from slime_rl.buffer.dumps import RolloutDumps, open_dumps
from slime_rl.buffer.opening import open_buffer
from slime_rl.cluster import rollout_manager
from slime_rl.cluster.rollout_manager import RolloutManager
from slime_rl.config import Config
from slime_rl.protocols import DataBuffer
from slime_rl.rollout.rewards.fence import ProcessFence
from slime_rl.rollout.runtime import RolloutRuntime
from slime_rl.types import RolloutOutput


async def scripted(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    """Two more groups than a step needs; every fifth one is dropped, and one sample of each group is left out."""
    for group in buffer.reserve(4):
        if group.group_index % 5 == 4:
            buffer.drop(group, "every_fifth")
            continue
        fill(group).leave_out({1: "late"})
        for sample in group.samples:
            sample.weight_versions = [step] * sample.response_length
        buffer.admit(group)
    return RolloutOutput(groups=buffer.take(step, 2), metrics={"rollout/seconds": 2.0})


def make_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> RolloutManager:
    monkeypatch.setattr(rollout_manager.ray, "put", lambda value: value)
    prompts = str(write_prompts(tmp_path / "p.jsonl", 40))
    sizes = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-steps", "9", "--prompt-data", prompts)
    config = make_config(tmp_path, *sizes, *flags)
    manager = RolloutManager(config)
    manager.rollout_function, manager.log_function = scripted, None
    manager.dumps = open_dumps(config)
    manager.opened = open_buffer(config, lambda prompt: [1])
    manager.runtime = RolloutRuntime(client=None, tokenizer=SimpleNamespace(decode=str))
    manager.fence = ProcessFence(1, 1.0)
    return manager


async def train(manager: RolloutManager, steps: range) -> list[dict[str, Any]]:
    taken = []
    for step in steps:
        await manager.submit_through(step)
        taken.append(await manager.take(step))
        await manager.commit(step)
    return taken


def test_a_step_reports_its_drops_and_dumps_what_it_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(tmp_path, monkeypatch, "--dump-rollouts", str(tmp_path / "dumps"))
    first, second = asyncio.run(train(manager, range(2)))
    assert "rollout/groups_dropped/every_fifth" not in first["metrics"]
    assert second["metrics"]["rollout/groups_dropped/every_fifth"] == 1
    assert second["metrics"]["buffer/dropped/every_fifth"] == 1
    assert second["metrics"]["rollout/samples_left_out/late"] == 2
    assert second["shards"][0].meta_info["num_samples"] == 2
    dumps = RolloutDumps(tmp_path / "dumps")
    assert [[group.group_index for group in dumps.read(step)] for step in dumps.steps()] == [[0, 1], [2, 3]]
    assert len(dumps.read(1)[0].samples) == 1 and dumps.read(1)[0].left_out == {"late": 1}


def test_a_resumed_run_goes_on_and_dumps_its_steps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--dump-rollouts", str(tmp_path / "dumps"))
    manager = make_manager(tmp_path, monkeypatch, *flags)
    asyncio.run(train(manager, range(2)))
    asyncio.run(manager.save(str(tmp_path / "buffer.json")))
    asyncio.run(train(manager, range(2, 4)))
    expected = RolloutDumps(tmp_path / "dumps").read(2)
    (tmp_path / "load").mkdir()
    resumed = make_manager(tmp_path, monkeypatch, *flags, "--load", str(tmp_path / "load"))
    asyncio.run(resumed.restore(str(tmp_path / "buffer.json"), 2))
    assert RolloutDumps(tmp_path / "dumps").steps() == [0, 1]
    (third,) = asyncio.run(train(resumed, range(2, 3)))
    assert RolloutDumps(tmp_path / "dumps").read(2) == expected
    assert third["metrics"]["rollout/groups_dropped/every_fifth"] == 1  # without the one before the resume
    assert third["metrics"]["buffer/dropped/every_fifth"] == 2


def test_waiting_groups_are_on_disk_while_the_trainer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in ((), ("--offload-buffer",)):
        manager = make_manager(tmp_path, monkeypatch, *flags, "--run-dir", str(tmp_path / f"run{len(flags)}"))
        payloads = manager.buffer.payloads  # type: ignore[attr-defined]

        async def one_step(manager: RolloutManager = manager, payloads: Any = payloads) -> tuple[int, int, int]:
            await manager.submit_through(0)
            await manager.take(0)
            at_work = payloads.memory_bytes
            await manager.commit(0)
            return at_work, payloads.memory_bytes, payloads.spilled_bytes

        at_work, after, spilled = asyncio.run(one_step())
        assert (at_work == 0) == bool(flags)
        assert after > 0 and spilled == 0
        manager.buffer.close()
