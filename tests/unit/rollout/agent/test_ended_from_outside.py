"""Episodes that the run, an engine or their own agent ends in the middle: nothing of them counts as finished."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scripted_engine import answer
from scripted_policy import calling, policy, tokens_of

from slime_rl.rollout.groups import GroupRunner
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.scope import SampleScope
from slime_rl.types import EnvironmentStart, EnvironmentStep, Group, Sample, Status

END = "<|im_end|>"
PARSED = ("--tool-call-parser", "qwen25")
background: list[asyncio.Task[Any]] = []


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


class Waits:
    """A tool or world that the test stops while it waits."""

    started = asyncio.Event()
    seconds = 30.0


async def waiting(x: str) -> str:
    """Waits."""
    Waits.started.set()
    await asyncio.sleep(Waits.seconds)
    return "late"


class WaitingWorld:
    def __init__(self, config: Any, sample: Any) -> None: ...

    async def reset(self) -> EnvironmentStart:
        return EnvironmentStart(messages=[{"role": "user", "content": "go"}])

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        await waiting("")
        return EnvironmentStep(reward=1.0, done=True)

    async def close(self) -> None: ...


class RaisingWorld(WaitingWorld):
    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        return EnvironmentStep(reward=float("x"))


async def call(base_url: str, key: str, text: str) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
        http.post(base_url + "/chat/completions", json=body) as response,
    ):
        return response.status


async def calls_till_refused(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Takes a refusal for a loss, as agents with a broad `except` do."""
    for n in range(3):
        if await call(base_url, api_key, f"call {n}") != 200:
            return 0.0
    return 1.0


async def leaves_a_call(data: dict[str, Any], base_url: str, api_key: str) -> float:
    await call(base_url, api_key, "first")
    background.append(asyncio.create_task(call(base_url, api_key, "second")))
    await asyncio.wait_for(Waits.started.wait(), 60)
    return 1.0


async def raises(data: dict[str, Any], base_url: str, api_key: str) -> float:
    return float("x")


def stop_when_waiting(scope: SampleScope) -> None:
    async def stop() -> None:
        await Waits.started.wait()
        scope.interrupt(0.0)
        assert scope.task is not None
        scope.task.cancel()

    background.append(asyncio.create_task(stop()))


def stop_after_a_request(scope: SampleScope) -> None:
    client: Any = current_runtime().client
    generate = client._generate

    async def once(*args: Any) -> Any:
        found = await generate(*args)
        scope.interrupt(0.0)
        return found

    client._generate = once


def run(
    tmp_path: Path, turns: list[Any], *flags: str, on_start: Callable[[SampleScope], None] | None = None, then: int = 0
) -> tuple[str | None, Sample, int]:
    """(verdict, the sample, requests); `then` runs the group again, uninterrupted."""
    Waits.started, Waits.seconds = asyncio.Event(), 30.0
    background.clear()

    async def go() -> tuple[str | None, Sample, int]:
        async with policy(tmp_path, turns, *PARSED, *flags) as (config, received):
            prompt = [{"role": "user", "content": "hi"}]
            samples = [Sample(index=0, group_index=0, rollout_id=0, prompt=prompt, label="51")]
            group = Group(group_index=0, source_index=0, epoch=0, samples=samples)
            verdict = await GroupRunner(config).run(group, {"max_new_tokens": 300}, on_start)
            for _ in range(then):
                assert verdict == "unfinished" and group.samples[0].status is Status.ABORTED
                Waits.seconds = 0.01
                verdict = await GroupRunner(config).run(group, {"max_new_tokens": 300})
            await asyncio.gather(*background)
            return verdict, group.samples[0], len(received)

    return asyncio.run(go())


def test_an_episode_that_is_stopped_at_its_tool_goes_on_with_the_tool(tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: [{name: waiting, function: 'test_ended_from_outside:waiting', timeout_s: 60}]\n")
    flags = ("--generate-function-path", "agent_loop", "--tool-config", str(tools), "--tools", "waiting")
    turns = [calling(("waiting", {"x": "1"})), "51" + END]
    verdict, sample, requests = run(tmp_path, turns, *flags, "--rm-type", "exact", on_start=stop_when_waiting, then=1)
    state = sample.metadata["agent"]
    assert verdict is None and sample.status is Status.COMPLETED and sample.reward == 1.0 and requests == 2
    assert [message["role"] for message in state["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (state["num_turns"], state["num_tool_calls"], state["parting"]) == (2, 1, None)


def environment(name: str) -> tuple[str, ...]:
    path = f"test_ended_from_outside:{name}"
    return ("--generate-function-path", "environment_loop", "--rm-type", "episode", "--environment-path", path)


def test_an_episode_that_is_stopped_in_its_world_is_not_scored_and_starts_anew(tmp_path: Path) -> None:
    flags = environment("WaitingWorld")
    verdict, sample, _ = run(tmp_path, ["a" + END] * 2, *flags, on_start=stop_when_waiting, then=1)
    assert verdict is None and sample.reward == 1.0 and sample.metadata["agent"]["num_turns"] == 1


def gateway(name: str) -> tuple[str, ...]:
    path = f"test_ended_from_outside:{name}"
    return ("--generate-function-path", "gateway", "--rm-type", "episode", "--agent-path", path)


def test_an_agent_that_takes_an_interruption_for_a_loss_is_not_believed(tmp_path: Path) -> None:
    flags = gateway("calls_till_refused")
    verdict, sample, _ = run(tmp_path, ["a" + END] * 3, *flags, on_start=stop_after_a_request)
    assert (verdict, sample.status, sample.reward) == ("unfinished", Status.ABORTED, None)


def test_a_call_that_its_agent_has_left_ends_with_the_session(tmp_path: Path) -> None:
    async def slow() -> dict[str, Any]:
        Waits.started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        return answer(tokens_of("x"))

    verdict, sample, _ = run(tmp_path, ["a" + END, slow()], *gateway("leaves_a_call"))
    assert verdict is None and sample.metadata["agent"]["num_branches"] == 1
    assert background[0].result() == 409


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (gateway("raises"), "--agent-path test_ended_from_outside:raises"),
        (
            (
                "--generate-function-path",
                "environment_loop",
                "--environment-path",
                "test_ended_from_outside:RaisingWorld",
            ),
            "--environment-path test_ended_from_outside:RaisingWorld",
        ),
    ],
)
def test_own_code_that_raises_is_named_with_its_line(tmp_path: Path, flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{named} raised ValueError: could not .* at .*outside.py:\d+, for sample 0"
    ):
        run(tmp_path, ["a" + END], *flags)


def test_a_verl_style_loop_goes_on_after_an_abort_and_ends_when_it_is_interrupted(tmp_path: Path) -> None:
    flags = ("--generate-function-path", "worlds:generate", "--rm-type", "episode")
    broken = answer(tokens_of("fo"), "fo", reason="abort")
    verdict, sample, requests = run(tmp_path, [broken, "ur", "five" + END], *flags)
    assert verdict is None and requests == 3 and sample.response.startswith("four Sure? five")
    verdict, sample, requests = run(tmp_path, ["four", "five"], *flags, on_start=stop_after_a_request)
    assert (verdict, sample.status, requests) == ("unfinished", Status.ABORTED, 1)


def test_a_verdict_of_the_policy_that_an_engine_breaks_off_goes_on(tmp_path: Path) -> None:
    broken = answer(tokens_of("Sco"), "Sco", reason="abort")
    rest = answer(tokens_of("re: 8"), "re: 8")
    verdict, sample, _ = run(tmp_path, ["a" + END, broken, rest], "--rm-type", "judge")
    assert verdict is None and sample.reward == 0.8
