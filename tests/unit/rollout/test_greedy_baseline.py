"""ReMax's baseline: one greedy response per prompt, scored as the others are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from factories import make_config
from scripted_engine import answer, scripted_engine

from slime_rl.data.batches import rollout_batch_from_groups
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.greedy import add_greedy_baseline
from slime_rl.rollout.groups import UNFINISHED, GroupRunner
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.types import Group, Sample, Status


async def length_and_size(config: Any, group: list[Sample]) -> list[dict[str, float]]:
    return [{"score": float(s.response_length), "group_size": float(len(group))} for s in group]


def make_group(index: int) -> Group:
    first = 2 * index
    samples = [
        Sample(index=i, group_index=index, rollout_id=i, prompt="p", tokens=[1, 2], prompt_length=2)
        for i in range(first, first + 2)
    ]
    return Group(group_index=index, source_index=0, epoch=0, samples=samples)


def run(config: Any, groups: list[Group], reply: Any) -> tuple[list[str | None], list[dict[str, Any]]]:
    async def go() -> tuple[list[str | None], list[dict[str, Any]]]:
        async with (
            scripted_engine(reply) as (url, received),
            EngineClient(url, max_in_flight=8, timeout_s=60) as client,
        ):
            with use_runtime(RolloutRuntime(client=client, tokenizer=None)):
                runner = GroupRunner(config)
                params = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 20}
                return [await runner.run(group, params) for group in groups], received

    return asyncio.run(go())


def greedy_is_longer(body: dict[str, Any]) -> dict[str, Any]:
    return answer([5, 6, 7, 2] if body["sampling_params"]["temperature"] == 0 else [5, 2])


def flags(estimator: str) -> list[str]:
    return ["--reward-function-path", "test_greedy_baseline:length_and_size", "--advantage-estimator", estimator]


def test_every_sample_of_the_batch_gets_the_reward_of_the_greedy_response(tmp_path: Path) -> None:
    groups = [make_group(0), make_group(1)]
    verdicts, received = run(make_config(tmp_path, *flags("remax")), groups, greedy_is_longer)
    assert verdicts == [None, None]
    greedy = [body["sampling_params"] for body in received if body["sampling_params"]["temperature"] == 0]
    assert len(received) == 6 and len(greedy) == 2
    assert all(params["top_p"] == 1.0 and params["top_k"] == -1 for params in greedy)
    batch = rollout_batch_from_groups(groups, 0, 0)
    assert torch.equal(batch.dense("baseline_rewards"), torch.full((4,), 4.0))
    assert torch.equal(batch.dense("rewards"), torch.full((4,), 2.0))
    assert all(sample.reward_info["group_size"] == 2 and sample.response_length == 2 for sample in groups[0].samples)


def test_interrupted_greedy_response_sends_the_group_back(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        is_greedy = body["sampling_params"]["temperature"] == 0
        return answer([5], reason="abort") if is_greedy else answer([5, 2])

    verdicts, _ = run(make_config(tmp_path, *flags("remax")), [make_group(0)], reply)
    assert verdicts == [UNFINISHED]


def test_other_estimators_ask_for_no_greedy_response(tmp_path: Path) -> None:
    groups = [make_group(0)]
    _, received = run(make_config(tmp_path, *flags("rloo")), groups, greedy_is_longer)
    assert len(received) == 2
    assert "baseline_rewards" not in rollout_batch_from_groups(groups, 0, 0)


def test_each_role_of_a_game_is_compared_with_the_same_role() -> None:
    def side(role: str, reward: float) -> Sample:
        state = {"agent": {"role": role}}
        return Sample(
            index=0, group_index=0, rollout_id=0, prompt="p", metadata=state, reward=reward, status=Status.COMPLETED
        )

    async def generate(sample: Sample, params: dict[str, Any]) -> list[Sample]:
        return [side("first", 1.0), side("first", 0.0), side("second", -1.0)]

    async def score(samples: list[Sample]) -> None: ...

    group = make_group(0)
    group.samples = [side("first", 0.0), side("second", 0.0), side("third", 0.0)]
    assert asyncio.run(add_greedy_baseline(group, {}, generate, score))
    assert [sample.reward_info["baseline_reward"] for sample in group.samples] == [0.5, -1.0, 0.0]
