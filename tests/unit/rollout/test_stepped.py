"""Production step by step with a rollout function of the user's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripted_rollout import CharTokenizer, ScriptedClient, run_virtual, scripted_config
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.protocols import DataBuffer
from slime_rl.rollout.group_loop import ROLLOUT_FUNCTIONS, group_loop
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.rollout.stepped import SteppedProduction
from slime_rl.types import RolloutOutput


async def as_ours(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    return await group_loop(config, step, buffer)


async def raising(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    raise KeyError("no such step")


async def cancels(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    raise asyncio.CancelledError


async def nothing(config: Config, step: int, buffer: DataBuffer) -> Any:
    return None


async def no_groups(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    return RolloutOutput(groups=[], metrics={})


async def samples(config: Config, step: int, buffer: DataBuffer) -> Any:
    return RolloutOutput(groups=(await group_loop(config, step, buffer)).groups[0].samples, metrics={})  # type: ignore[arg-type]


async def words(config: Config, step: int, buffer: DataBuffer) -> Any:
    output = await group_loop(config, step, buffer)
    return RolloutOutput(groups=output.groups, metrics={"speed": "high"})  # type: ignore[dict-item]


def taken(tmp_path: Path, name: str, ahead: str) -> RolloutOutput:
    sizes = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-steps", "3", "--rollout-ahead", ahead)
    config = scripted_config(tmp_path, 9, *sizes, "--rollout-function-path", f"test_stepped:{name}")

    async def go() -> RolloutOutput:
        buffer = LedgerBuffer(config, FilePromptSource(config))
        async with ScriptedClient(lambda ids: 5, slots=8) as client:
            with use_runtime(RolloutRuntime(client=client, tokenizer=CharTokenizer())):
                function = ROLLOUT_FUNCTIONS.load(config.rollout.rollout_function_path)
                production = SteppedProduction(config, buffer, function, 0)
                try:
                    production.submit_through(config.rollout.rollout_ahead)
                    return await production.take(0)
                finally:
                    await production.close()

    return run_virtual(go())


@pytest.mark.parametrize("ahead", ["0", "2"])
def test_an_own_rollout_function_produces_the_steps(tmp_path: Path, ahead: str) -> None:
    assert [group.group_index for group in taken(tmp_path, "as_ours", ahead).groups] == [0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", r"raised KeyError: 'no such step' at .*test_stepped\.py:\d+, for step 0"),
        ("cancels", "raised CancelledError, for step 0"),
        ("nothing", "must return a RolloutOutput, got NoneType, for step 0"),
        ("no_groups", r"must return the groups that it took as a list of Group, got \[\], for step 0"),
        ("samples", r"must return the groups that it took as a list of Group, got \[Sample"),
        ("words", "must return metrics as numbers by name, got {'speed': 'high'}, for step 0"),
    ],
)
def test_what_an_own_rollout_function_gets_wrong_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--rollout-function-path test_stepped:{name} {message}"):
        taken(tmp_path, name, "0")
