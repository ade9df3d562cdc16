"""Several turns on a real engine: what the gateway and the environment loop record is what the engine sampled."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import make_config

from slime_rl.config import Config
from slime_rl.data.rendering import load_tokenizer
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer
from slime_rl.rollout.agent.black_box import gateway
from slime_rl.rollout.agent.environments import environment_loop
from slime_rl.rollout.agent.gateway.server import Gateway
from slime_rl.rollout.agent.parsing import ParsedTurn
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.types import Sample
from tools.make_tool_task import main as make_tool_task

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 40}
GAME = {"game": "plugins.environments.number_game:NumberGame", "seed": 1, "options": {"guesses": 2}}


class PlainParser:
    """Every turn is text: a model of random weights calls no tool, and SGLang's parsers have a test of their own."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        return ParsedTurn(content=text)


async def two_questions(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent on the official client, which sends back what it got."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        for question in ("and?", None):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": question})
    return 0.25


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Config, str]]:
    folder = tmp_path_factory.mktemp("agents")
    make_tool_task(["--output", str(folder / "task")])
    paths = ("test_agents:two_questions", "plugins.environments.number_game:GymTextEnvironment")
    lengths = ("--max-prompt-len", "256", "--max-response-len", "128")
    flags = (*lengths, "--agent-path", paths[0], "--environment-path", paths[1], "--max-turns", "2")
    config = make_config(folder, "--hf-checkpoint", str(folder / "task" / "model"), *flags)
    server = EngineServer(config, 0, Path(config.run_dir))
    server.start()
    try:
        yield config, server.url
    finally:
        server.stop()


def run(engine: tuple[Config, str], function: Any, sample: Sample) -> list[Sample]:
    config, url = engine

    async def go() -> list[Sample]:
        server = Gateway()
        await server.start()
        try:
            async with EngineClient(url, max_in_flight=4, timeout_s=600) as client:
                tokenizer = load_tokenizer(config)
                with use_runtime(
                    RolloutRuntime(client=client, tokenizer=tokenizer, make_parser=PlainParser, gateway=server)
                ):
                    result = await function(config, sample, dict(PARAMS))
        finally:
            await server.close()
        return result if isinstance(result, list) else [result]

    return asyncio.run(go())


def recomputed(url: str, tokens: list[int]) -> list[float]:
    """The engine's log-probs of `tokens[1:]`, as a prompt."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as answer:
        entries = json.loads(answer.read())["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in entries[1:]]


def check_log_probs(url: str, sample: Sample) -> None:
    expected = recomputed(url, sample.tokens)[sample.prompt_length - 1 :]
    pairs = list(zip(sample.loss_mask, sample.rollout_log_probs, expected, strict=True))
    assert sum(sample.loss_mask) > 0
    assert max(abs(have - want) for mask, have, want in pairs if mask) < 1e-3
    assert all(have == 0.0 for mask, have, _ in pairs if not mask)


def test_an_unmodified_openai_agent_trains_on_what_the_engine_sampled(engine: tuple[Config, str]) -> None:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="12*34=", label="408")
    sample.set_prompt_tokens([1])
    (made,) = run(engine, gateway, sample)
    state = made.metadata["agent"]
    assert (state["num_turns"], state["num_branches"], state["reward"]) == (2, 1, 0.25)
    assert {v for v, m in zip(made.weight_versions, made.loss_mask, strict=True) if m} == {0}
    check_log_probs(engine[1], made)


def test_an_environment_talks_with_the_policy_in_masked_turns(engine: tuple[Config, str]) -> None:
    sample = Sample(index=0, group_index=0, rollout_id=0, prompt="", metadata={"environment": GAME})
    (made,) = run(engine, environment_loop, sample)
    assert made.metadata["agent"]["stop_reason"] in ("done", "max_turns", "max_tokens")
    check_log_probs(engine[1], made)


def test_sessions_of_the_gateway_survive_the_kill_of_an_engine(engine: tuple[Config, str], tmp_path: Path) -> None:
    """Half of the sessions' calls are at an engine that is killed; each gets its answer from the other one."""
    config, url = engine
    sessions, turns = 8, 6
    calls: list[int] = []
    second, router = EngineServer(config, 1, tmp_path), RouterProcess(config, tmp_path)

    async def agent(data: dict[str, Any], base_url: str, api_key: str) -> float:
        from openai import AsyncOpenAI

        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for _ in range(turns):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
                calls.append(1)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "and?"})
        return 1.0

    async def go() -> list[Sample]:
        server = Gateway()
        await server.start()
        async with EngineClient(router.url, max_in_flight=16, timeout_s=600) as client:
            runtime = RolloutRuntime(
                client=client, tokenizer=load_tokenizer(config), make_parser=PlainParser, gateway=server
            )
            with use_runtime(runtime):
                tasks = [asyncio.create_task(one_session(server, number)) for number in range(sessions)]
                while len(calls) < sessions:  # every session is under way
                    await asyncio.sleep(0.01)
                for process in psutil.Process(second.supervisor_pid).children():
                    process.kill()
                made = await asyncio.gather(*tasks)
            assert client.num_retries > 0
        await server.close()
        return made

    async def one_session(server: Gateway, number: int) -> Sample:
        sample = Sample(index=number, group_index=0, rollout_id=number, prompt=f"{10 + number}*34=")
        with server.session(sample, dict(PARAMS)) as session:
            await agent({"prompt": sample.prompt}, server.base_url, session.key)
            (made,) = session.samples()
        return made

    try:
        router.start()
        second.start()
        for engine_url in (url, second.url):
            router.add_worker(engine_url)
        made = asyncio.run(go())
    finally:
        second.stop()
        router.stop()
    assert [sample.metadata["agent"]["num_turns"] for sample in made] == [turns] * sessions
    for sample in made:
        check_log_probs(url, sample)
