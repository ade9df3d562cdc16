from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime_rl.protocols import DataBuffer, GenerateFunction, GroupFilter, PromptSource, RewardFunction
from slime_rl.registry import ExtensionPoint, own_code

REWARD = ExtensionPoint("--reward-function-path", RewardFunction, {"math": "my_plugin:good_reward"})
FILTER = ExtensionPoint("--dynamic-filter-path", GroupFilter, {})
PLUGIN = """
import functools

async def good_reward(config, group):
    return [1.0 for _ in group]

async def reward_with_default(config, group, scale=1.0):
    return [scale for _ in group]

def sync_reward(config, group):
    return []

async def short_reward(group):
    return []

async def greedy_reward(config, group, model):
    return []

class RewardObject:
    async def __call__(self, config, group):
        return []

class Rewards:
    async def score(self, config, group):
        return []

reward_object = RewardObject()
rewards = Rewards()
partial_reward = functools.partial(reward_with_default, scale=2.0)
lambda_filter = lambda config, group: None
number = 5

class WholeSource:
    def __init__(self, config): ...
    def next_prompts(self, num_prompts): ...
    def get(self, source_index): ...
    def state_dict(self): ...
    def load_state_dict(self, state): ...
    def __len__(self): return 0

class SourceWithoutLen:
    def next_prompts(self, num_prompts): ...
    def get(self, source_index): ...
    def state_dict(self): ...
    def load_state_dict(self, state): ...

class SourceWithOtherArguments(WholeSource):
    def get(self): ...

class SourceOfAnotherStyle(WholeSource):
    def get(this, source_index): ...
    @staticmethod
    def next_prompts(num_prompts): ...
    @classmethod
    def load_state_dict(kind, state): ...

class RewardOfAnotherStyle:
    async def __call__(this, config, group):
        return []

other_reward = RewardOfAnotherStyle()
"""


@pytest.fixture(autouse=True)
def plugin_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_registered_name_and_a_path_load_the_same_function() -> None:
    assert REWARD.load("math") is REWARD.load("my_plugin:good_reward")


@pytest.mark.parametrize(
    "name", ["good_reward", "reward_with_default", "reward_object", "rewards.score", "partial_reward", "other_reward"]
)
def test_everything_that_can_be_called_like_the_protocol_loads(name: str) -> None:
    assert callable(REWARD.load(f"my_plugin:{name}"))


def test_a_lambda_is_a_filter() -> None:
    assert FILTER.load("my_plugin:lambda_filter")(None, []) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("maths", r"--reward-function-path: 'maths' is not one of math or of the form .*; did you mean 'math'\?"),
        ("my_plugin", r"'my_plugin' is not one of math or of the form package.module:name"),
        ("my_plugin:", r"'my_plugin:' is not one of"),
        ("no_such_module:f", r"cannot import 'no_such_module' of 'no_such_module:f': ModuleNotFoundError"),
        ("broken_plugin:f", r"cannot import 'broken_plugin' .*RuntimeError: no licence"),
        ("my_plugin:good_rewards", r"'my_plugin' has no 'good_rewards'; did you mean 'good_reward'\?"),
        ("my_plugin:number", r"'my_plugin:number' is a int, not something that can be called"),
        ("my_plugin:short_reward", r"takes \(group\), but it is called as \(config, group\)"),
        ("my_plugin:greedy_reward", r"called as \(config, group\): missing a required argument: 'model'"),
        ("my_plugin:sync_reward", r"must be `async def` and take \(config, group\)"),
    ],
)
def test_error_names_flag_value_and_what_is_wanted(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        REWARD.load(spec)
    assert str(error.value).startswith("--reward-function-path: ")


def test_async_where_a_plain_function_is_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a plain function \(not async\) and take \(config, group\)"):
        FILTER.load("my_plugin:good_reward")


def test_a_class_needs_every_method_of_its_protocol() -> None:
    point = ExtensionPoint("--data-source-path", PromptSource, {})
    assert point.load("my_plugin:WholeSource").__name__ == "WholeSource"
    assert point.load("my_plugin:SourceOfAnotherStyle").__name__ == "SourceOfAnotherStyle"
    with pytest.raises(ValueError, match=r"--data-source-path: .* has no method __len__"):
        point.load("my_plugin:SourceWithoutLen")
    with pytest.raises(
        ValueError, match=r"SourceWithOtherArguments.get' takes \(self\), .* called as \(source_index\)"
    ):
        point.load("my_plugin:SourceWithOtherArguments")
    with pytest.raises(ValueError, match=r"--buffer-path: .* has no method reserve"):
        ExtensionPoint("--buffer-path", DataBuffer, {}).load("my_plugin:WholeSource")


def test_partial_of_an_async_function_with_too_few_parameters_left_is_refused() -> None:
    async def generate(config: Any, sample: Any) -> None: ...

    point = ExtensionPoint("--generate-function-path", GenerateFunction, {})
    with pytest.raises(ValueError, match=r"called as \(config, sample, sampling_params\)"):
        point.check("here:f", functools.partial(generate))


@pytest.mark.parametrize("spec", ["./my/rewards.py:reward", "my/rewards.py:reward", "my/rewards:reward"])
def test_a_file_is_answered_with_its_module(spec: str) -> None:
    point = ExtensionPoint(flag="--x", protocol=GroupFilter, builtins={})
    with pytest.raises(ValueError, match=rf"--x: '{spec}' names a file; give the module, as my\.rewards:reward"):
        point.load(spec)


def interrupted() -> None:
    with own_code("--model-provider-path"):
        raise KeyboardInterrupt


async def interrupted_task() -> None:
    interrupted()


def test_ctrl_c_is_not_blamed_on_the_users_code() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_interrupt_that_the_users_code_raises_itself_does_not_end_an_event_loop() -> None:
    with pytest.raises(ValueError, match="--model-provider-path raised KeyboardInterrupt"):
        asyncio.run(interrupted_task())
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="raised KeyboardInterrupt"):
        pool.submit(interrupted).result()
