from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from factories import make_config, write_model_folder

from slime_rl.config import Config
from slime_rl.rollout.rewards import REWARDS
from slime_rl.rollout.rewards.code import program_of
from slime_rl.rollout.rewards.fence import ProcessFence, use_fence
from slime_rl.rollout.rewards.judge import rubric_text
from slime_rl.rollout.rewards.sandbox import run_program
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.types import Sample, Status


def sample(response: str, label: Any = None, index: int = 0, **metadata: Any) -> Sample:
    made = Sample(index=index, group_index=0, rollout_id=index, prompt="q", label=label, metadata=metadata)
    made.response, made.status = response, Status.COMPLETED
    return made


def score(config: Config, name: str, samples: Sequence[Sample]) -> list[Any]:
    async def go() -> list[Any]:
        with ProcessFence(1, timeout_s=60.0) as fence, use_fence(fence):
            return await REWARDS.load(name)(config, list(samples))

    return asyncio.run(go())


def in_block(program: str) -> str:
    return f"Here:\n```python\n{program}\n```\nDone."


DOUBLE = "n = int(input())\nprint(2 * n)"
IO_TESTS = [{"input": "3\n", "output": "6\n"}, {"input": "-1", "output": "-2"}]
FUNCTION_TEST = [{"assert": "assert f(2) == 4"}]


@pytest.mark.parametrize(
    ("program", "tests", "passed", "failure"),
    [
        (DOUBLE, IO_TESTS, 1.0, None),
        ("print(6)", IO_TESTS, 0.5, "wrong output"),
        ("def f(x): return 2 * x", FUNCTION_TEST, 1.0, None),
        ("def f(x): return x", FUNCTION_TEST, 0.0, "assertion"),
        ("def f(x): return x\nimport os; os._exit(0)", FUNCTION_TEST, 0.0, "error"),
        ("def f(x): return x\nraise SystemExit(0)", FUNCTION_TEST, 0.0, "error"),
        ("while True: pass", FUNCTION_TEST, 0.0, "time"),
        ("x = bytearray(4 << 30)", FUNCTION_TEST, 0.0, "memory"),
        ("while True: print('x' * 1000)", FUNCTION_TEST, 0.0, "output"),
        ("import os\nfor _ in range(6): os.fork()\nimport time; time.sleep(600)", FUNCTION_TEST, 0.0, "processes"),
    ],
)
def test_programs_are_run_against_their_tests(
    tmp_path: Path, program: str, tests: list[dict[str, str]], passed: float, failure: str | None
) -> None:
    config = make_config(tmp_path, "--reward-timeout-s", "1" if failure == "time" else "30")
    (value,) = score(config, "code", [sample(in_block(program), tests=tests)])
    assert (value["passed"], value.get("failure")) == (passed, failure)
    assert value["score"] == float(passed == 1.0)


def test_a_program_has_no_network_and_a_folder_of_its_own() -> None:
    refused = run_program("import socket\nsocket.create_connection(('127.0.0.1', 9))", "", 60.0)
    assert refused["status"] == 1 and "PermissionError" in refused["errors"]
    wrote = run_program("open('f', 'w').write('x'); import os; print(os.listdir('.'))", "", 60.0)
    assert sorted(eval(wrote["output"])) == ["f", "main.py"]
    large = run_program("open('f', 'wb').write(b'x' * (64 << 20))", "", 60.0)
    assert large["status"] == 1 and "File too large" in large["errors"]


def test_a_program_cannot_signal_others() -> None:
    run = run_program("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "", 60.0)
    assert run["status"] == 1 and "PermissionError" in run["errors"]


def test_the_last_code_block_is_the_program() -> None:
    assert program_of("```python\na\n```\n```py\nb\n```") == "b\n"
    assert program_of("print(1)") == "print(1)" and program_of("I do not know.") is None


def test_a_code_prompt_without_tests_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs metadata\['tests'\].*sample 7"):
        score(make_config(tmp_path), "code", [sample("x", index=7)])
    with pytest.raises(ValueError, match="has texts 'input' and 'output', or 'assert'"):
        score(make_config(tmp_path), "code", [sample(in_block("x"), tests=[{"input": "1"}])])
    with pytest.raises(
        ValueError, match=r"may print 8388608 bytes, but the 'output' of a test has 9000000, for sample 4"
    ):
        score(make_config(tmp_path), "code", [sample(in_block("x"), index=4, tests=[{"output": "x" * 9_000_000}])])


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ('{"n": 3}', None, 1.0),
        ('<think>{"n": -1}</think>\n```json\n{"n": 3}\n```', None, 1.0),
        ('{"n": -1}', None, 0.0),
        ("{n: 3}", None, 0.0),
        ('{"n": 3}', {"n": 3}, 1.0),
        ('{"n": 4}', {"n": 3}, 0.0),
        ('{"n": 4}', '{"n": 3}', 0.0),
        ('{"n": 3.0}', '{"n": 3}', 1.0),
        ('{"n": 1, "b": [true]}', {"n": 1, "b": [1]}, 0.0),
        ('{"n": 1, "x": NaN}', None, 0.0),
        ('```json\r\n{"n": 1}\r\n```', None, 1.0),
        ("[" * 100_000, None, 0.0),
    ],
)
def test_json_is_checked_against_its_schema(tmp_path: Path, response: str, label: Any, expected: float) -> None:
    (value,) = score(make_config(tmp_path), "json_schema", [sample(response, label, schema=SCHEMA)])
    assert value["score"] == expected and bool(value["problem"]) == (expected == 0.0)


def test_a_json_prompt_without_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs metadata\['schema'\]"):
        score(make_config(tmp_path), "json_schema", [sample("{}")])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "'foo' is not valid"),
        ({"$ref": "#/nope"}, "nope"),
        ({"properties": {"n": {"$ref": "#/nope"}}}, "nope"),
    ],
)
def test_a_broken_schema_is_an_error_of_the_row(tmp_path: Path, schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"metadata\['schema'\] of sample 7: broken schema: .*{message}"):
        score(make_config(tmp_path), "json_schema", [sample('{"n": 1}', index=7, schema=schema)])


def test_a_label_that_begins_like_json_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the label of sample 0 looks like JSON and is none"):
        score(make_config(tmp_path), "json_schema", [sample('{"n": 1}', '{"n": ', schema=SCHEMA)])


@asynccontextmanager
async def service(path: str, reply: Callable[[dict[str, Any]], Any]) -> Any:
    """Serves `reply(body)` at `path`: an int is a status, a response goes out as it is; yields (base URL, bodies)."""
    received: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        received.append(await request.json())
        result = reply(received[-1])
        if isinstance(result, web.Response):
            return result
        return web.Response(status=result) if isinstance(result, int) else web.json_response(result)

    app = web.Application()
    app.router.add_post(path, handle)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/"), received
    finally:
        await server.close()


def remotely(
    tmp_path: Path, name: str, path: str, reply: Any, samples: list[Sample], *flags: str, tail: str = ""
) -> Any:
    class NoTemplate:
        chat_template = None

    async def go() -> Any:
        async with service(path, reply) as (url, received):
            config = make_config(tmp_path, "--rm-type", name, "--reward-url", url + tail, *flags)
            with use_runtime(RolloutRuntime(client=None, tokenizer=NoTemplate())):
                return await REWARDS.load(name)(config, samples), received

    return asyncio.run(go())


def test_a_service_is_asked_in_batches_and_after_a_failure_again(tmp_path: Path) -> None:
    answers = iter([503, 503])

    def reply(body: dict[str, Any]) -> Any:
        failed = next(answers, None)
        return failed or {"rewards": [len(s["response"]) for s in body["samples"]]}

    samples = [sample("x" * i, index=i) for i in range(5)]
    values, received = remotely(tmp_path, "remote", "/score", reply, samples, "--reward-batch-size", "2", tail="/score")
    assert values == [0, 1, 2, 3, 4] and len(received) == 3 + 2
    assert {len(body["samples"]) for body in received} == {1, 2}


def test_a_service_that_refuses_or_answers_nonsense_ends_it(tmp_path: Path) -> None:
    for reply, message in ((400, "refused the request: HTTP 400"), ({"rewards": [1]}, "must answer 'rewards' for 2")):
        with pytest.raises(ValueError, match=message):
            remotely(tmp_path, "remote", "/score", lambda body, r=reply: r, [sample("a"), sample("b")], tail="/score")


def test_a_page_of_an_error_that_is_no_text_is_asked_again(tmp_path: Path) -> None:
    pages = [
        web.Response(status=502, body=b"d\xe9faut"),
        web.Response(status=502, body=b"x", headers={"Content-Type": "text/html; charset=bogus"}),
    ]

    def reply(body: dict[str, Any]) -> Any:
        return pages.pop() if pages else {"rewards": [1.0]}

    values, received = remotely(tmp_path, "remote", "/score", reply, [sample("a")], tail="/score")
    assert values == [1.0] and len(received) == 3


def test_a_judge_is_asked_again_while_a_shared_router_has_no_engine(tmp_path: Path) -> None:
    verdict = {"choices": [{"message": {"content": "Score: 4"}}]}
    answers = [verdict, web.Response(status=404, text="Model 'judge' not found or no router available")]
    values, received = remotely(
        tmp_path, "judge", "/v1/chat/completions", lambda body: answers.pop(), [sample("a")], tail="/v1"
    )
    assert values[0]["score"] == 0.4 and len(received) == 2


@pytest.mark.parametrize("body", [b"hello", b"", b"\xe9", b"[" * 200_000])
def test_an_answer_that_is_not_json_is_named(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(ValueError, match=r"--reward-url http.* answered something that is not JSON"):
        remotely(tmp_path, "remote", "/score", lambda _: web.Response(body=body), [sample("a")], tail="/score")


def test_metadata_that_is_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--reward-url: what would be sent cannot be written as JSON: .*set"):
        remotely(tmp_path, "remote", "/score", lambda _: 500, [sample("a", x={1})], tail="/score")


def test_a_service_that_stays_away_is_given_up_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="--reward-request-timeout-s"):
        flags = ("--reward-request-timeout-s", "0.7")
        remotely(tmp_path, "remote", "/score", lambda body: 503, [sample("a")], *flags, tail="/score")
    assert time.monotonic() - started < 60.0


def test_a_reward_model_scores_conversations(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Any:
        return [{"embedding": [float(len(text)), 9.0]} for text in body["text"]]

    values, received = remotely(tmp_path, "reward_model", "/classify", reply, [sample("abc"), sample("")])
    assert received == [{"text": ["q\nabc", "q\n"]}] and values == [5.0, 2.0]


def test_a_score_of_a_reward_model_beyond_every_float_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="answered no embeddings"):
        remotely(tmp_path, "reward_model", "/classify", lambda body: [{"embedding": [10**400]}], [sample("a")])


def test_nothing_to_judge_is_not_sent(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric"
    rubric.write_text("{response}\n")
    samples, flags = [sample(""), sample(" \n"), sample("4")], ("--judge-prompt", str(rubric))

    def reply(_: Any) -> Any:
        return {"choices": [{"message": {"content": "Score: 10"}}]}

    values, received = remotely(tmp_path, "judge", "/v1/chat/completions", reply, samples, *flags, tail="/v1")
    assert [body["messages"][0]["content"] for body in received] == ["4\n"]
    assert [(value["score"], value["judge_unreadable"]) for value in values] == [(0.0, 1.0), (0.0, 1.0), (1.0, 0.0)]


def test_a_judges_last_score_counts(tmp_path: Path) -> None:
    verdicts = iter(["Score: 2? No.\nScore: 7", "I will not say.", "**Score:** 99"])

    def reply(body: dict[str, Any]) -> Any:
        return {"choices": [{"message": {"content": next(verdicts)}}]}

    samples = [sample(r, "ref", i) for i, r in enumerate("abc")]
    values, received = remotely(tmp_path, "judge", "/v1/chat/completions", reply, samples, tail="/v1")
    assert sorted(value["score"] for value in values) == [0.0, 0.7, 1.0]
    assert sum(value["judge_unreadable"] for value in values) == 1.0
    assert received[0]["temperature"] == 0.0 and "ref" in received[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("**Score**: 8", 0.8),
        ("**Final Score:** 8", 0.8),
        ("Score: [8]", 0.8),
        ("Score: **7.5**.", 0.75),
        ("Score: 8/10", 0.8),
        ("Score: 80 out of 100", 0.8),
        ('{"score": 8}', 0.8),
        ([{"type": "text", "text": "Sco"}, {"type": "image"}, {"type": "text", "text": "re: 7"}], 0.7),
        ("Score: 1e9", None),
        ("Score: 1.5e9", None),
        ("Score: 1/0", None),
        ("Score: 80%", None),
        ("Score: " + "9" * 5000 + "/" + "9" * 5000, None),
        ("Score: N, that is 8", None),
        ("underscore: 5", None),
        (None, None),
    ],
)
def test_a_verdict_is_read_in_the_forms_that_judges_write(tmp_path: Path, content: Any, expected: float | None) -> None:
    def reply(body: dict[str, Any]) -> Any:
        return {"choices": [{"message": {"content": content}}]}

    ([value], _) = remotely(tmp_path, "judge", "/v1/chat/completions", reply, [sample("a")], tail="/v1")
    assert (value["score"], value["judge_unreadable"]) == (expected or 0.0, float(expected is None))


@pytest.mark.parametrize("content", [7, {"text": "Score: 7"}, ["Score: 7"], [{"type": "text", "text": 7}]])
def test_a_verdict_that_is_no_text_is_named(tmp_path: Path, content: Any) -> None:
    def reply(body: dict[str, Any]) -> Any:
        return {"choices": [{"message": {"content": content}}]}

    with pytest.raises(ValueError, match=r"--reward-url .* answered no chat completion"):
        remotely(tmp_path, "judge", "/v1/chat/completions", reply, [sample("a")], tail="/v1")


@asynccontextmanager
async def router_over(engine: str, asked: list[str], shared: bool) -> Any:
    """A router that has an engine of the model (`shared`: and one of another), forwards what routers forward, and wants
    a key. `asked` is filled with the models that are asked for."""

    async def workers(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer word"
        urls = {"policy": "http://127.0.0.1:9", "other": engine} if shared else {"": engine}
        found = [{"url": url, "is_healthy": True, "model_id": model} for model, url in urls.items()]
        return web.json_response({"workers": found})

    async def chat(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer word"
        asked.append((await request.json())["model"])
        return web.json_response({"choices": [{"message": {"content": "Score: 4"}}]})

    app = web.Application()
    app.router.add_get("/workers", workers)
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_beside_the_policy_judges_and_scores(tmp_path: Path, shared: bool) -> None:
    class NoTemplate:
        chat_template = None

    judge = write_model_folder(tmp_path / "judge")
    groups = "server_groups: [{num_gpus: 1}]"
    (tmp_path / "key").write_text("word")
    (tmp_path / "engines.yaml").write_text(
        f"sglang: [{{name: p, {groups}}}, {{name: other, model_path: {judge}, {groups}}}]"
    )
    flags = ("--sglang-config", str(tmp_path / "engines.yaml"), "--reward-url", "sglang:other")
    flags += ("--engine-api-key-file", str(tmp_path / "key"), *["--share-router"] * shared)
    asked: list[str] = []

    async def go() -> Any:
        async with (
            service("/classify", lambda body: [{"embedding": [3.0]}]) as (engine, _),
            router_over(engine, asked, shared) as url,
        ):
            with use_runtime(RolloutRuntime(client=None, tokenizer=NoTemplate(), models={"other": url})):
                config = make_config(tmp_path, "--rm-type", "judge", *flags)
                (verdict,) = await REWARDS.load("judge")(config, [sample("a")])
                scores = await REWARDS.load("reward_model")(config, [sample("a")])
        return verdict["score"], scores

    assert asyncio.run(go()) == (0.4, [3.0])
    assert asked == ["other" if shared else "judge"]


def test_a_response_cannot_fill_in_the_rubric() -> None:
    assert rubric_text("{prompt} {response} {label}", sample("{label}", "secret")) == "q {label} secret"


def test_a_rubric_without_a_place_for_the_response_is_refused(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Is it good?")
    with pytest.raises(ValueError, match=r"must contain \{response\}"):
        score(make_config(tmp_path, "--judge-prompt", str(rubric)), "judge", [sample("a")])


def test_rewards_are_weighed_by_row(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--reward-mixture", "exact=2", "f1=0.5")
    rows = [sample("red", "red"), sample("blue", "red"), sample("x b", "x c", rewards={"f1": 1.0})]
    values = score(config, "mixture", rows)
    assert [v["score"] for v in values[:2]] == [2.5, 0.0]
    assert values[2] == {"score": 0.5, "reward/f1": 0.5}
    assert values[0]["reward/exact"] == 1.0


async def verdict_of_two(config: Any, group: list[Sample]) -> list[dict[str, Any]]:
    return [{"score": 0.5, "verdict": "so so", "failure": "none"} for _ in group]


def test_a_mixture_keeps_what_its_parts_tell_by_their_names(tmp_path: Path) -> None:
    own = f"{__name__}:verdict_of_two"
    row = sample("no program", [{"input": "", "output": "1"}], rewards={own: 2, "code": 1})
    (value,) = score(make_config(tmp_path), "mixture", [row])
    told = {f"{own}/verdict": "so so", f"{own}/failure": "none", "code/failure": "no code", "code/passed": 0.0}
    assert value == {"score": 1.0, f"reward/{own}": 0.5, "reward/code": 0.0, **told}


@pytest.mark.parametrize(
    ("flags", "row", "message"),
    [
        ((), {}, "needs metadata"),
        ((), {"rewards": {"exact": "much"}}, "no number"),
        ((), {"rewards": {"mixture": 1}}, "cannot contain itself"),
        ((), {"rewards": {"slime_rl.rollout.rewards.mixture:mixture": 1}}, "cannot contain itself"),
        ((), {"rewards": {"exact": float("nan")}}, "must be finite"),
        ((), {"rewards": {"exact": 10**400}}, "must be finite"),
        ((), {"rewards": {5: 1}}, "is named 5, no text"),
        ((), {"rewards": {"exakt": 1}}, "did you mean 'exact'"),
    ],
)
def test_a_wrong_mixture_is_named(tmp_path: Path, flags: tuple[str, ...], row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(make_config(tmp_path, *flags), "mixture", [sample("a", "a", **row)])


async def two_of_three(config: Any, group: list[Sample]) -> Any:
    return [1.0] * (len(group) - 1)


async def keyed(config: Any, group: list[Sample]) -> Any:
    return dict.fromkeys(range(len(group)), 1.0)


async def scoreless(config: Any, group: list[Sample]) -> Any:
    return [{"format": 1.0} for _ in group]


async def endless(config: Any, group: list[Sample]) -> Any:
    return [10**400 for _ in group]


async def emptying(config: Any, group: list[Sample]) -> Any:
    group.clear()
    return [0.0]


async def exiting(config: Any, group: list[Sample]) -> Any:
    sys.exit(3)


ended: list[str] = []


async def waiting(config: Any, group: list[Sample]) -> Any:
    try:
        await asyncio.sleep(30)
    finally:
        ended.append("waiting")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two_of_three", "one value for each of the 1 samples, got 0 values"),
        ("keyed", "got a dict"),
        ("scoreless", "a dict without 'score' for sample 0"),
        ("endless", "finite numbers, got 1000"),
        ("exiting", "raised SystemExit: 3 at .*test_more_rewards.py"),
    ],
)
def test_a_part_of_a_mixture_is_held_to_the_rules_of_rewards(tmp_path: Path, name: str, message: str) -> None:
    path = f"test_more_rewards:{name}"
    row = sample("a", "a", rewards={"test_more_rewards:waiting": 1, path: 1, "test_more_rewards:emptying": 1})
    ended.clear()
    with pytest.raises(ValueError, match=f"^--rm-type mixture: {path} .*{message}"):
        score(make_config(tmp_path), "mixture", [row])
    assert ended == ["waiting"], "a part that fails ends the others"


def test_flags_of_rewards_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--reward-url is needed by --rm-type remote"):
        make_config(tmp_path, "--rm-type", "remote")
    with pytest.raises(ValueError, match="--reward-mixture takes NAME=WEIGHT"):
        make_config(tmp_path, "--reward-mixture", "exact")
    with pytest.raises(ValueError, match="--reward-mixture takes each reward once"):
        make_config(tmp_path, "--reward-mixture", "exact=1", "exact=2")


def test_an_episodes_own_reward_is_taken(tmp_path: Path) -> None:
    assert score(make_config(tmp_path), "episode", [sample("x", agent={"reward": 0.5})]) == [0.5]
    assert score(make_config(tmp_path), "episode", [sample("x", agent={"reward": np.float32(0.5)})]) == [0.5]
    with pytest.raises(ValueError, match="has no reward of its own"):
        score(make_config(tmp_path), "episode", [sample("x")])
