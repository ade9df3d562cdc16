from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import worlds
from aiohttp import web
from aiohttp.test_utils import TestServer
from factories import make_config
from scripted_engine import answer
from scripted_policy import TOKENIZER, calling, policy, tokens_of

from plugins.environments.aviary_style import aviary_environment
from plugins.environments.number_game import NumberGame
from slime_rl.rollout.agent.environments import ENVIRONMENTS, environment_loop, load_environment
from slime_rl.rollout.generate import GENERATE_FUNCTIONS
from slime_rl.rollout.greedy import bare_sample
from slime_rl.rollout.rewards.episode import episode
from slime_rl.types import EnvironmentStart, EnvironmentStep, Group, Sample, Status

END = "<|im_end|>"
GAME = "plugins.environments.number_game:GymTextEnvironment"


def play(tmp_path: Path, world: str, turns: list[Any], *flags: str, label: Any = None, **metadata: Any) -> Any:
    """(sample, requests) of one episode; an aborted one is taken up again."""

    async def go() -> Any:
        async with policy(tmp_path, turns, "--environment-path", world, *flags) as (config, received):
            sample = Sample(index=0, group_index=4, rollout_id=0, prompt="the row's", label=label, metadata=metadata)
            while sample.status in (Status.PENDING, Status.ABORTED):
                left = 600 - sample.response_length
                assert await environment_loop(config, sample, {"max_new_tokens": left}) is sample
            return sample, received, await episode(config, [sample])

    return asyncio.run(go())


def game_row(**more: Any) -> dict[str, Any]:
    return {"game": "plugins.environments.number_game:NumberGame", "seed": 3, **more}


def secret() -> int:
    game = NumberGame(20)
    game.reset(3)
    return game.secret


def test_a_game_is_played_to_its_end(tmp_path: Path) -> None:
    low = secret() - 1
    row = game_row(options={"highest": 20})
    sample, requests, rewards = play(tmp_path, GAME, [f"{low}{END}", f"It is {secret()}.{END}"], environment=row)
    assert rewards == [1.0] and sample.status is Status.COMPLETED
    state = sample.metadata["agent"]
    assert (state["num_turns"], state["stop_reason"], state["parting"]) == (2, "done", None)
    assert [m["content"] for m in state["messages"] if m["role"] == "user"][1].startswith("Higher. 6 guesses left")
    trained = [t for t, m in zip(sample.response_tokens, sample.loss_mask, strict=True) if m]
    assert trained == tokens_of(f"{low}{END}") + tokens_of(f"It is {secret()}.{END}")
    assert "the row's" not in TOKENIZER.decode(requests[0]["input_ids"])


def test_losing_pays_nothing(tmp_path: Path) -> None:
    row = game_row(options={"highest": 20, "guesses": 2})
    sample, _, rewards = play(tmp_path, GAME, [f"no idea{END}", f"{secret() + 1}{END}"], environment=row)
    assert rewards == [0.0] and sample.metadata["agent"]["stop_reason"] == "done"


def test_the_last_allowed_turn_ends_the_episode(tmp_path: Path) -> None:
    row = game_row(options={"highest": 20})
    sample, requests, rewards = play(tmp_path, GAME, [f"0{END}"] * 9, "--max-turns", "2", environment=row)
    assert (len(requests), rewards, sample.status) == (2, [0.0], Status.TRUNCATED)


def test_an_interrupted_episode_starts_anew(tmp_path: Path) -> None:
    row = game_row(options={"highest": 20})
    turns = [f"0{END}", answer(tokens_of("1"), reason="abort"), f"{secret()}{END}"]
    sample, requests, rewards = play(tmp_path, GAME, turns, environment=row)
    assert rewards == [1.0] and sample.metadata["agent"]["num_turns"] == 1
    assert requests[2]["input_ids"] == requests[0]["input_ids"]


def test_a_row_without_its_game_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata\['environment'\] with 'game'"):
        play(tmp_path, GAME, [])


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ("NoMessages", "step must give messages unless the episode is done"),
        ("WrongStep", "step must return an EnvironmentStep, got tuple"),
    ],
)
def test_a_world_that_does_not_fit_is_named_and_closed(tmp_path: Path, world: str, message: str) -> None:
    before = getattr(worlds, world).closed
    with pytest.raises(ValueError, match=message):
        play(tmp_path, f"worlds:{world}", [f"a{END}"])
    assert getattr(worlds, world).closed == before + 1


def test_a_class_that_is_no_environment_fails_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no method step"):
        ENVIRONMENTS.load("worlds:NotAWorld")
    with pytest.raises(ValueError, match="needs --environment-path"):
        load_environment(make_config(tmp_path))
    assert GENERATE_FUNCTIONS.load("environment_loop") is environment_loop


def test_reasoning_gym_gives_another_try(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from plugins.data.reasoning_gym_source import rows_of
    from plugins.data.reasoning_gym_tasks import parse_task_spec

    row = rows_of(parse_task_spec("chain_sum?size=1&seed=5&min_terms=2&max_terms=2"))[0]
    world = "plugins.environments.reasoning_gym_retry:ReasoningGymEnvironment"
    turns = [f"{int(row['label']) + 1}{END}", f"{row['label']}{END}"]
    _, _, rewards = play(tmp_path, world, turns, **row["metadata"])
    assert rewards == [0.5]


def test_a_verifiers_style_environment_scores_by_its_rubric(tmp_path: Path) -> None:
    turns = [f"six{END}", f"five{END}"]
    sample, _, rewards = play(tmp_path, "worlds:DoubleCheckWorld", turns, label="five")
    assert rewards == [pytest.approx(1.0 + 0.1 * 2)]
    assert [m["content"] for m in sample.metadata["agent"]["messages"]] == ["the row's", "six", "Sure?", "five"]


def test_an_aviary_style_environment_has_its_own_tools(tmp_path: Path) -> None:
    turns = [f"well{END}", calling(("add", {"n": 2})), calling(("add", {"n": 3}))]
    sample, requests, rewards = play(tmp_path, "worlds:CounterWorld", turns, target=5)
    assert rewards == [1.0] and sample.metadata["agent"]["stop_reason"] == "done"
    roles = [m["role"] for m in sample.metadata["agent"]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert '"name": "add"' in TOKENIZER.decode(requests[0]["input_ids"]), "the policy is shown the tools"


def test_the_aviary_package_itself_fits(tmp_path: Path) -> None:
    core = pytest.importorskip("aviary.core")
    world = aviary_environment(lambda metadata: core.DummyEnv(**metadata))

    async def go() -> Any:
        one = world(make_config(tmp_path), Sample(index=0, group_index=0, rollout_id=0, prompt="p", metadata={}))
        start = await one.reset()
        idle = await one.step({"role": "assistant", "content": "Let me think."})
        call = {"id": "call00000", "type": "function", "function": {"name": "print_story", "arguments": {"story": "s"}}}
        end = await one.step({"role": "assistant", "content": "", "tool_calls": [call]})
        await one.close()
        return start, idle, end

    start, idle, end = asyncio.run(go())
    assert start.messages[0]["role"] == "user" and start.tools[0]["function"]["name"] == "print_story"
    assert (idle.reward, idle.done, idle.messages[0]["role"]) == (0.0, False, "user")
    assert (end.reward, end.done, end.messages[0]["tool_call_id"]) == (1.0, True, "call00000")


@asynccontextmanager
async def resources_server() -> Any:
    """A NeMo-Gym-style server: a till that adds up, one for each session."""
    tills: dict[str, int] = {}
    verified: list[dict[str, Any]] = []

    async def seed(request: web.Request) -> web.Response:
        name = str(len(tills))
        tills[name] = (await request.json())["start"]
        answer = web.json_response({})
        answer.set_cookie("session", name)
        return answer

    async def add(request: web.Request) -> web.Response:
        name = request.cookies["session"]
        tills[name] += (await request.json())["n"]
        return web.json_response({"sum": tills[name]})

    async def verify(request: web.Request) -> web.Response:
        verified.append(await request.json())
        return web.json_response({"reward": float(tills[request.cookies["session"]] == verified[-1]["wanted"])})

    app = web.Application()
    app.router.add_post("/seed_session", seed)
    app.router.add_post("/add", add)
    app.router.add_post("/verify", verify)
    async with TestServer(app) as server:
        yield str(server.make_url("")), verified


def test_a_nemo_gym_style_server_is_an_environment(tmp_path: Path) -> None:
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
    asked = [{"role": "developer", "content": "Be exact."}, {"role": "user", "content": "Make it 7."}]
    row = {"responses_create_params": {"input": asked, "tools": [tool]}, "start": 2, "wanted": 7}
    turns = [calling(("add", {"n": 5})), calling(("subtract", {"n": 1})), f"Done.{END}"]

    async def go() -> Any:
        flags = ("--environment-path", "plugins.environments.nemo_gym_style:NemoGymEnvironment")
        async with resources_server() as (url, verified), policy(tmp_path, turns, *flags) as run:
            told = {"environment": {"url": url, "row": row}}
            sample = Sample(index=0, group_index=0, rollout_id=0, prompt="p", metadata=told)
            await environment_loop(run[0], sample, {"max_new_tokens": 900})
            return sample, verified

    sample, (verified,) = asyncio.run(go())
    state = sample.metadata["agent"]
    assert (state["reward"], state["stop_reason"], state["num_tool_calls"]) == (1.0, "done", 2)
    assert [m["role"] for m in state["messages"]][:2] == ["system", "user"]
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    assert verified["response"]["output"][1]["output"] == '{"sum": 7}'
    assert "no tool 'subtract'" in verified["response"]["output"][3]["output"], (
        "an unknown tool is for the policy to read"
    )


@asynccontextmanager
async def echo_server() -> Any:
    """An OpenEnv-style server: echoes, pays the length, is done after two steps."""
    steps: list[str] = []

    async def reset(request: web.Request) -> web.Response:
        steps.clear()
        return web.json_response({"observation": {"text": "say something"}, "reward": None, "done": False})

    async def step(request: web.Request) -> web.Response:
        steps.append((await request.json())["action"]["message"])
        observation = {"text": f"you said {steps[-1]}"}
        return web.json_response({"observation": observation, "reward": len(steps[-1]), "done": len(steps) == 2})

    app = web.Application()
    app.router.add_post("/reset", reset)
    app.router.add_post("/step", step)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


def test_an_openenv_style_server_is_an_environment(tmp_path: Path) -> None:
    async def go() -> Any:
        world = "plugins.environments.openenv_style:OpenEnvEnvironment"
        async with echo_server() as url, policy(tmp_path, [f"a{END}", f"bcd{END}"], "--environment-path", world) as run:
            told = {"url": url, "text": "text", "action": "message"}
            sample = Sample(index=0, group_index=0, rollout_id=0, prompt="p", metadata={"environment": told})
            await environment_loop(run[0], sample, {"max_new_tokens": 500})
            return sample

    sample = asyncio.run(go())
    assert sample.metadata["agent"]["reward"] == 4.0 and sample.metadata["agent"]["stop_reason"] == "done"
    assert "you said a" in TOKENIZER.decode(sample.response_tokens)


def run_loop(tmp_path: Path, name: str) -> Sample:
    async def go() -> Sample:
        turns = [answer(tokens_of("four"), version="1"), answer(tokens_of("five" + END), version="2")]
        async with policy(tmp_path, turns) as (config, _):
            sample = Sample(index=0, group_index=0, rollout_id=0, prompt="2+3=", label="5")
            return await GENERATE_FUNCTIONS.load(f"worlds:{name}")(config, sample, {"max_new_tokens": 50})

    return asyncio.run(go())


def test_a_verl_style_loop_is_a_generate_function(tmp_path: Path) -> None:
    sample = run_loop(tmp_path, "generate")
    n, m, k = len(tokens_of("four")), len(tokens_of(" Sure? ")), len(tokens_of("five" + END))
    assert sample.loss_mask == [1] * n + [0] * m + [1] * k
    assert sample.weight_versions == [1] * n + [-1] * m + [2] * k
    assert sample.tokens[: sample.prompt_length] == tokens_of("2+3=")
    assert sample.metadata["agent"]["reward"] == 0.5 and sample.status is Status.COMPLETED


def test_a_verl_style_loop_that_changes_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="response token 0 was not sampled like that"):
        run_loop(tmp_path, "retokenising")


@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        ("answer", {"reward": None, "done": True}, "must be a finite number, got None"),
        ("answer", {"reward": "x", "done": True}, "must be a finite number, got 'x'"),
        ("answer", {"reward": float("nan"), "done": True}, "must be a finite number, got nan"),
        ("answer", {"reward": 10**400, "done": True}, "must be a finite number, got 1000"),
        ("answer", {"done": "false"}, "done must be True or False, got 'false'"),
        ("answer", {"messages": ["hi"]}, "step gave a message that is no dict"),
        ("answer", {"messages": {"role": "user"}}, "step must give a list of messages"),
        ("answer", {"messages": [{"role": "user", "content": 5}]}, "step gave a message whose content is no text"),
        ("answer", {"messages": [{"content": "x"}]}, "no dict with a role"),
        ("start", {"messages": []}, "at least one message"),
        ("start", {"messages": "go"}, "a list of messages"),
        ("start", {"messages": [{"role": "user", "content": "go"}], "tools": ["x"]}, "a tool must be a schema"),
        ("start", {"messages": [{"role": "user", "content": "go"}], "tools": "x"}, "must be a list of schemas"),
    ],
)
def test_a_step_and_a_reset_that_are_odd_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(worlds.Scripted, place, given)
    with pytest.raises(ValueError, match=f"--environment-path worlds:Scripted: .*{message}"):
        play(tmp_path, "worlds:Scripted", ["a" + END])


class Remembering(worlds.NoMessages):
    """Keeps one list of messages for itself and the policy, and edits what it is given."""

    def __init__(self, config: Any, sample: Any) -> None:
        self.talk: list[dict[str, Any]] = [{"role": "user", "content": "go"}]

    async def reset(self) -> EnvironmentStart:
        return EnvironmentStart(messages=self.talk)

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        action["content"] = action["content"].upper()
        self.talk += [action, {"role": "assistant", "content": "I see."}]
        return EnvironmentStep(messages=self.talk[-1:], done=len(self.talk) > 4)


def test_a_world_may_do_as_it_likes_with_its_messages_and_end_them_with_the_assistants(tmp_path: Path) -> None:
    sample, requests, _ = play(tmp_path, "test_environments:Remembering", ["a" + END, "b" + END])
    assert sample.prompt == [{"role": "user", "content": "go"}] and len(requests) == 2
    assert [m["content"] for m in sample.metadata["agent"]["messages"]] == ["go", "a", "I see.", "b"]


class Instructing(worlds.Scripted):
    """Puts something before the row's prompt."""

    async def reset(self) -> EnvironmentStart:
        begin = {"role": "system", "content": "Play."}
        return EnvironmentStart(messages=[begin, {"role": "user", "content": self.sample.prompt}])


def test_a_world_that_starts_anew_is_given_the_prompt_of_the_row_again(tmp_path: Path) -> None:
    turns = [answer(tokens_of("a"), reason="abort"), "b" + END]
    sample, requests, _ = play(tmp_path, "test_environments:Instructing", turns)
    assert requests[0]["input_ids"] == requests[1]["input_ids"]
    assert [m["content"] for m in sample.prompt] == ["Play.", "the row's"]
    greedy = bare_sample(Group(group_index=0, source_index=0, epoch=0, samples=[sample]))

    async def again() -> None:
        async with policy(tmp_path, ["c" + END], "--environment-path", "test_environments:Instructing") as (config, _):
            await environment_loop(config, greedy, {"max_new_tokens": 50})

    asyncio.run(again())
    assert greedy.prompt == sample.prompt


def test_an_endless_number_is_no_guess() -> None:
    game = NumberGame(20)
    game.reset(3)
    assert game.step("9" * 5000)[0].startswith("That is no number")


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("start", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("start", {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "a", "x": {1}}}]}),
        ("start", {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}),
        ("answer", {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}),
    ],
)
def test_messages_that_no_template_takes_are_the_worlds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(worlds.Scripted, place, given)
    with pytest.raises(ValueError, match=r"^--environment-path worlds:Scripted: its messages cannot be rendered: "):
        play(tmp_path, "worlds:Scripted", ["a" + END])


@pytest.mark.parametrize("closing", ["raise", "hang"])
def test_a_world_that_does_not_close_keeps_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, closing: str
) -> None:
    monkeypatch.setattr(worlds.Scripted, "closing", closing)
    patience_s = "1" if closing == "hang" else "60"
    _, _, rewards = play(tmp_path, "worlds:Scripted", ["a" + END], "--tool-timeout-s", patience_s)
    assert rewards == [1.0] and "--environment-path worlds:Scripted: close failed" in caplog.text


def ask_server(
    tmp_path: Path,
    world: str,
    told: dict[str, Any],
    turns: list[Any],
    answers: dict[str, Any],
    patience_s: str = "60",
) -> Any:
    """(state or ValueError, paths asked for) of an episode on a server; an answer is a status, a value or a wait."""
    paths: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        paths.append(request.path)
        given = answers.get(request.path, {})
        given = given.pop(0) if isinstance(given, list) else given
        if isinstance(given, float):
            await asyncio.sleep(given)
        return web.Response(status=given) if isinstance(given, int) else web.json_response(given)

    async def go() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        flags = ("--environment-path", f"plugins.environments.{world}", "--tool-timeout-s", patience_s)
        async with TestServer(app) as server, policy(tmp_path, turns, *flags) as (config, _):
            environment = {"url": str(server.make_url("")), **told}
            sample = Sample(index=0, group_index=0, rollout_id=0, prompt="p", metadata={"environment": environment})
            try:
                await environment_loop(config, sample, {"max_new_tokens": 900})
            except ValueError as error:
                return error, paths
            return sample.metadata["agent"], paths

    return asyncio.run(go())


NEMO = "nemo_gym_style:NemoGymEnvironment"
OPEN = "openenv_style:OpenEnvEnvironment"
GET = {"row": {"responses_create_params": {"input": "go", "tools": [{"type": "function", "name": "get"}]}}}
FIELDS = {"text": "text", "action": "message"}


def test_a_policy_reaches_the_tools_of_its_row_only(tmp_path: Path) -> None:
    calls = calling(("verify", {"a": 1}), ("seed_session", {}), ("../x?y", {}), ("get", {}))
    answers = {"/verify": {"reward": 1}, "/get": {"x": 1}}
    state, paths = ask_server(tmp_path, NEMO, GET, [calls, "ok" + END], answers)
    assert paths == ["/seed_session", "/get", "/verify"] and state["reward"] == 1.0
    told = [m["content"] for m in state["messages"] if m["role"] == "tool"]
    assert [text.startswith("Error: there is no tool") for text in told] == [True, True, True, False]


def test_a_tool_that_is_slow_is_text_and_a_verifier_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    answers = {"/get": 3.0, "/verify": [500, {"reward": 0.5}]}
    state, paths = ask_server(tmp_path, NEMO, GET, [calling(("get", {})), "ok" + END], answers, "1")
    assert state["messages"][2]["content"] == "Error: get gave no answer within 1 s"
    assert paths.count("/verify") == 2 and state["reward"] == 0.5


@pytest.mark.parametrize(
    ("world", "told", "answers", "message"),
    [
        (NEMO, GET, {"/verify": {}}, "must be a finite number, got None"),
        (NEMO, GET, {"/verify": ["x"]}, "verify must answer a JSON object"),
        (OPEN, FIELDS, {"/reset": {"observation": "t"}}, "an observation that is no object"),
        (
            OPEN,
            FIELDS,
            {"/reset": {"observation": {}}, "/step": 3.0},
            "step gave no answer within --tool-timeout-s 1",
        ),
        (OPEN, FIELDS, {"/reset": {"observation": {}}, "/step": {"observation": {}, "reward": "x"}}, "got 'x'"),
        (OPEN, FIELDS, {"/reset": {"observation": {}}, "/step": {"observation": {}, "done": "false"}}, "got 'false'"),
    ],
)
def test_a_server_that_answers_oddly_is_named(
    tmp_path: Path, world: str, told: dict[str, Any], answers: dict[str, Any], message: str
) -> None:
    patience_s = "1" if "no answer" in message else "60"
    error, _ = ask_server(tmp_path, world, told, ["a" + END], answers, patience_s)
    assert isinstance(error, ValueError) and message in str(error)
