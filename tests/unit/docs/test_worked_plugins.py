"""The examples of docs/customisation.md, taken from the page: each fits its flag, and does what it says."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout" / "agent"))
from factories import make_config
from scripted_policy import policy

from benchmarks.tiny_models import make_checkpoint
from benchmarks.trainer_cases import make_batch, open_worker
from benchmarks.trainer_cases import make_config as make_train_config
from slime_rl.algorithms.registry import ADVANTAGES, OFF_POLICY, POLICY_LOSSES
from slime_rl.buffer import policies
from slime_rl.buffer.conformance import check_buffer
from slime_rl.buffer.opening import open_buffer
from slime_rl.registry import ExtensionPoint
from slime_rl.rollout.agent.black_box import AGENTS
from slime_rl.rollout.agent.environments import ENVIRONMENTS, environment_loop
from slime_rl.rollout.extra_metrics import LOG_FUNCTIONS, extra_metrics
from slime_rl.rollout.generate import GENERATE_FUNCTIONS
from slime_rl.rollout.group_loop import ROLLOUT_FUNCTIONS
from slime_rl.rollout.rewards import REWARDS
from slime_rl.trainer.cpu import proxy
from slime_rl.trainer.plugins import MODEL_CONVERSION, MODEL_PROVIDER
from slime_rl.types import Sample

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "customisation.md").read_text()
END = "<|im_end|>"
POINTS: list[ExtensionPoint] = [
    *(ADVANTAGES, OFF_POLICY, POLICY_LOSSES, ENVIRONMENTS, AGENTS, LOG_FUNCTIONS, GENERATE_FUNCTIONS),
    *(ROLLOUT_FUNCTIONS, REWARDS, MODEL_CONVERSION, MODEL_PROVIDER),
    *(point for point in vars(policies).values() if isinstance(point, ExtensionPoint)),
]


def flag_of(point: ExtensionPoint) -> str:
    return "--reward-function-path" if point is REWARDS else point.flag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The blocks of the page as a module my_plugins, and one my_models beside it."""
    folder = tmp_path_factory.mktemp("own")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "my_plugins.py").write_text("\n".join(b for b in blocks if not b.startswith("# my_models.py")))
    (folder / "my_models.py").write_text("\n".join(b for b in blocks if b.startswith("# my_models.py")))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("my_plugins")
    sys.path.remove(str(folder))
    for name in ("my_plugins", "my_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("point", POINTS, ids=flag_of)
def test_every_extension_point_has_an_example_that_fits(point: ExtensionPoint, page: ModuleType) -> None:
    named = re.findall(rf"{flag_of(point)} (my_\w+:\w+)", PAGE)
    assert named, f"docs/customisation.md has no example of {flag_of(point)}"
    if any(name.startswith("my_models") for name in named):
        proxy.install(without_cuda=True)  # as a train worker does, before Megatron is imported
    for name in named:
        point.load(name)


def test_every_flag_of_the_table_is_an_extension_point() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `--")]
    assert {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)} - {"--rm-type"} == {
        flag_of(point) for point in POINTS
    }


def test_a_step_with_the_functions_of_the_page(page: ModuleType, tmp_path: Path) -> None:
    own = {
        "--data-source-path": "Sums", "--buffer-path": "CountingBuffer", "--buffer-filter-path": "best_first",
        "--generate-function-path": "think_twice", "--reward-function-path": "reward",
        "--log-function-path": "answered",
        "--dynamic-filter-path": "not_too_easy", "--sample-filter-path": "not_too_long",
        "--rollout-function-path": "timed",
    }  # fmt: skip
    flags = [word for flag, name in own.items() for word in (flag, f"my_plugins:{name}")]
    flags += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]

    async def go() -> Any:
        async with policy(tmp_path, itertools.repeat(f"the answer: 1{END}"), *flags) as (config, received):
            buffer = open_buffer(config, lambda prompt: [1])
            output = await ROLLOUT_FUNCTIONS.load(config.rollout.rollout_function_path)(config, 0, buffer)
            samples = [sample for group in output.groups for sample in group.samples]
            return output, buffer, received, extra_metrics(page.answered, config, 0, samples)

    output, buffer, received, extra = asyncio.run(go())
    assert [group.samples[0].prompt for group in output.groups] == ["0+0=", "0+2="]  # 0+1= was answered by all
    assert buffer.counts()["dropped/too_easy"] == 1 and buffer.admitted == 2 and len(received) == 12
    sample = output.groups[0].samples[0]
    assert "Are you sure?" in sample.response and 0 < sample.num_trained_tokens < sample.response_length
    assert sample.reward == 0.0 and sample.reward_info["length"] == sample.response_length
    assert output.metrics["rollout/answers_per_s"] > 0 and extra == {"mine/answered": 1.0}


def test_the_functions_of_samples_and_rows(page: ModuleType, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    samples = [
        Sample(index=i, group_index=0, rollout_id=i, prompt="p", loss_mask=[1] * n) for i, n in enumerate((1, 9))
    ]
    assert page.not_too_long(config, samples) == [None, "too_long"]
    source = page.Sums(config)
    assert [prompt.prompt for _, prompt in source.next_prompts(3)] == ["0+0=", "0+1=", "0+2="]
    other = page.Sums(config)
    other.load_state_dict(source.state_dict())
    assert other.next_prompts(98)[-1][0] == 1 and other.get(99).label == "18"
    prompts = {row: source.get(row) for row in range(3)}
    assert page.short_first(config, 0, [2, 1], prompts.__getitem__) == [2, 1]


def test_the_buffer_keeps_the_contract(page: ModuleType) -> None:
    assert [name for name, problem in check_buffer("my_plugins:CountingBuffer").items() if problem] == []


def test_the_world_and_the_agent_give_their_rewards(page: ModuleType, tmp_path: Path) -> None:
    async def go() -> list[float]:
        rewards = []
        for turns, flag, name in (
            (["no", "yes"], "--environment-path", "Echo"),
            (["oh yes"], "--agent-path", "ask"),
        ):
            async with policy(tmp_path, [turn + END for turn in turns], flag, f"my_plugins:{name}") as (config, _):
                sample = Sample(index=0, group_index=0, rollout_id=0, prompt="Well?", label="yes")
                sample.set_prompt_tokens([1])
                play = environment_loop if name == "Echo" else GENERATE_FUNCTIONS.load("gateway")
                played = await play(config, sample, {"max_new_tokens": 100})
                (played,) = played if isinstance(played, list) else [played]
                rewards.append(played.metadata["agent"]["reward"])
        return rewards

    assert asyncio.run(go()) == [1.0, 1.0]


def test_training_with_the_functions_of_the_page(page: ModuleType, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    own = ["--advantage-estimator", "my_plugins:centred", "--policy-loss", "my_plugins:plain"]
    own += ["--off-policy-correction", "my_plugins:halved", "--model-conversion-path", "my_models:Tempered"]
    batch = make_batch()
    with open_worker(make_train_config(tmp_path, *own)) as worker:
        plain = worker.compute_log_probs(batch)
        metrics = worker.train(0, batch)
    assert metrics["train/grad_norm"] > 0 and metrics["train/mine_log_prob"] < 0
    with open_worker(make_train_config(tmp_path, *own, "--model-provider-path", "my_models:tempered")) as worker:
        assert not torch.allclose(worker.compute_log_probs(batch), plain)
