"""The manager with the real buffer and production; only Ray's object store is left out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config, write_prompts
from scripted_engine import answer, scripted_engine
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.buffer.contract_scene import fill
from slime_rl.buffer.dumps import RolloutDumps, open_dumps
from slime_rl.buffer.opening import open_buffer
from slime_rl.cluster import rollout_manager
from slime_rl.cluster.rollout_manager import RolloutManager
from slime_rl.config import Config, parse_config
from slime_rl.protocols import DataBuffer
from slime_rl.rollout.rewards.fence import ProcessFence
from slime_rl.rollout.runtime import RolloutRuntime
from slime_rl.types import RolloutOutput, Sample


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
    assert second["batch"].policy[0].meta_info["num_samples"] == 2
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


def test_lengths_that_order_prompts_are_part_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are used; a run that goes back to a checkpoint forgets what it has learnt since."""
    order = ("--rollout-order", "longest_first")
    manager = make_manager(tmp_path, monkeypatch, *order)
    groups = manager.buffer.reserve(3)
    for number, group in enumerate(groups):
        manager.lengths.record(group.source_index, 10 * number + 1)
    path = tmp_path / "step" / "buffer.json"
    path.parent.mkdir()
    asyncio.run(manager.save(str(path)))
    assert (path.parent / "lengths.json").is_file()
    resumed = make_manager(tmp_path, monkeypatch, *order)
    resumed.first_state = resumed.buffer.state_dict()
    asyncio.run(resumed.restore(str(path), 0))
    again = resumed.buffer.reserve(4)
    assert [g.group_index for g in resumed.lengths.longest_first(again)] == [2, 1, 3, 0]  # 3 is new: the mean
    resumed.lengths.record(again[0].source_index, 500)
    asyncio.run(resumed.restore(str(path), 0))
    assert resumed.lengths.state_dict() == manager.lengths.state_dict()
    asyncio.run(resumed.restore(None, 0))
    assert len(resumed.lengths.state_dict()["rows"]) == 0
    (tmp_path / "plain").mkdir()
    asyncio.run(make_manager(tmp_path, monkeypatch).save(str(tmp_path / "plain" / "buffer.json")))
    assert not list((tmp_path / "plain").glob("lengths*"))


def test_a_run_that_only_evaluates_reads_no_training_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny")
    held = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 3)), "--rm-type", "exact")
    flags = ("--hf-checkpoint", str(model), "--num-steps", "0", "--no-apply-chat-template", *held)
    config = parse_config([*flags, "--eval-n-samples-per-prompt", "2", "--run-dir", str(tmp_path / "run")])
    texts = iter(["1", "0", "3", "3", "0", "0"])  # to 0+1=, 1+2= and 2+3=

    async def go() -> tuple[dict[str, float], list[Sample]]:
        async with scripted_engine(lambda body: answer([20, 2], next(texts))) as (url, _):
            manager = RolloutManager(config)
            await manager.prepare()
            await manager.connect(url)
            for checkpoint in (None, str(tmp_path / "buffer.json")):  # of --load: the weights in it are what counts
                await manager.restore(checkpoint, 5)
            await manager.weights_are(5)
            assert manager.opened is None and manager.running is None
            try:
                return await manager.evaluate()
            finally:
                await manager.close()

    metrics, samples = asyncio.run(go())
    assert metrics["eval/held/accuracy"] == 0.5 and metrics["eval/held/pass_at_2"] == pytest.approx(2 / 3)
    assert metrics["eval/held/majority"] == 0.5
    assert len(samples) == config.logging.log_samples


def test_going_back_to_a_checkpoint_ends_the_evaluation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(tmp_path, monkeypatch)

    async def never_ends() -> tuple[dict[str, float], list[Sample]]:
        await asyncio.sleep(1e9)
        return {}, []

    manager.evaluator = SimpleNamespace(evaluate=never_ends)  # type: ignore[assignment]

    async def go() -> None:
        evaluation = asyncio.create_task(manager.evaluate())
        await asyncio.sleep(0)
        await manager.halt()
        assert await evaluation == ({}, []) and manager.evaluating is None

    asyncio.run(go())


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
