"""Multi-turn generation in an environment: `--generate-function-path environment_loop --environment-path …`.

reset ──► prompt ──► policy's turn ──► step ──done──► reward: `--rm-type episode`
                          ▲              │
                          └── messages ◄─┘ masked
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import Environment
from slime_rl.registry import ExtensionPoint, own_code
from slime_rl.rollout.agent.episode import STATE_KEY, Episode
from slime_rl.rollout.agent.turns import TurnRenderer
from slime_rl.rollout.generate import DROP_HINT
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample, Status, finite_number

ROW_PROMPT = "row_prompt"
log = logging.getLogger(__name__)
ENVIRONMENTS = ExtensionPoint(flag="--environment-path", protocol=Environment, builtins={})


def load_environment(config: Config) -> Any:
    """The class of --environment-path. Raises ValueError when there is none or it does not fit."""
    if config.agent.environment_path is None:
        raise ValueError("--generate-function-path environment_loop needs --environment-path: the class to run")
    return ENVIRONMENTS.load(config.agent.environment_path)


async def environment_loop(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let policy and environment talk until the environment is done or a limit ends the episode.

    The sum of the rewards is `metadata["agent"]["reward"]`, which `--rm-type episode` reads. Stop reasons are "done",
    "max_turns" and "max_tokens". An interrupted episode starts anew: a world cannot be put back where it was.

    Raises:
        ValueError: the world raised, a prompt over --max-prompt-len, or a step of another form; names the flag.

    A world that fails to close, or does not within --tool-timeout-s, is reported; its episode counts.
    """
    budget = sampling_params["max_new_tokens"] + sample.response_length
    sample.clear_response()
    row_prompt = sample.prompt = _row_prompt(sample)
    with _asking(config, sample):
        world: Environment = load_environment(config)(config, sample)
    try:
        with _asking(config, sample):
            start = await world.reset()
        _check(config, "reset", start, EnvironmentStart)
        _check_messages(config, "reset", start.messages)
        _check_tools(config, start.tools)
        with _rendering(config):
            start = copy.deepcopy(start)  # worlds go on with the list that they gave
            _begin(config, sample, start)
            episode = Episode(config, sample, {**sampling_params, "max_new_tokens": budget}, start.tools)
        sample.metadata[STATE_KEY] |= {"reward": 0.0, ROW_PROMPT: row_prompt}
        return await _play(config, world, episode)
    finally:
        await _close(config, world)


async def _play(config: Config, world: Environment, episode: Episode) -> Sample:
    state = episode.state
    while (parsed := await episode.turn()) is not None:
        state["num_tool_calls"] += len(parsed.calls)
        state["num_tool_errors"] += int(parsed.malformed)
        with _asking(config, episode.sample):
            step = await world.step(copy.deepcopy(episode.messages[-1]))
        _check_step(config, step)
        state["reward"] += float(step.reward)
        if step.done:
            return episode.end("done")
        if state["num_turns"] >= config.agent.max_turns:
            return episode.end("max_turns", Status.TRUNCATED)
        if not step.messages:
            raise ValueError(f"{_flag(config)}: step must give messages unless the episode is done")
        with _rendering(config):
            told = [{**copy.deepcopy(m), "content": episode.cut(m.get("content") or "")} for m in step.messages]
            if not episode.add(told):
                break
    return episode.sample


def _begin(config: Config, sample: Sample, start: EnvironmentStart) -> None:
    tokens = TurnRenderer(current_runtime().tokenizer, start.tools).prompt(start.messages)
    limit = config.sampling.max_prompt_len
    if len(tokens) > limit:
        raise ValueError(f"a prompt has {len(tokens)} tokens, over --max-prompt-len {limit}")
    sample.prompt = start.messages
    sample.set_prompt_tokens(tokens)


def _row_prompt(sample: Sample) -> Any:
    """The prompt as the source gave it, also where an earlier start has put the world's in its place."""
    state = sample.metadata.get(STATE_KEY)
    return state.get(ROW_PROMPT, sample.prompt) if isinstance(state, dict) else sample.prompt


def _check(config: Config, method: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{_flag(config)}: {method} must return an {kind.__name__}, got {type(value).__name__}")


def _check_step(config: Config, step: Any) -> None:
    _check(config, "step", step, EnvironmentStep)
    if finite_number(step.reward) is None:
        raise ValueError(f"{_flag(config)}: the reward of a step must be a finite number, got {step.reward!r:.300}")
    if not isinstance(step.done, bool):
        raise ValueError(f"{_flag(config)}: a step's done must be True or False, got {step.done!r}")
    _check_messages(config, "step", step.messages)


def _check_messages(config: Config, method: str, messages: Any) -> None:
    if not isinstance(messages, list):
        raise ValueError(f"{_flag(config)}: {method} must give a list of messages, got {messages!r}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{_flag(config)}: {method} gave a message that is no dict with a role: {message!r}")
        if not isinstance(message.get("content"), str | None):
            raise ValueError(f"{_flag(config)}: {method} gave a message whose content is no text: {message!r}")
    if method == "reset" and not messages:
        raise ValueError(f"{_flag(config)}: reset must give at least one message")


def _check_tools(config: Config, tools: Any) -> None:
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{_flag(config)}: the tools of reset must be a list of schemas or None, got {tools!r}")
    for tool in tools or []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{_flag(config)}: a tool must be a schema whose 'function' has a name, got {tool!r}")


async def _close(config: Config, world: Environment) -> None:
    try:
        async with asyncio.timeout(config.agent.tool_timeout_s):
            await world.close()
    except (Exception, SystemExit) as error:
        # The episode is over: what it brought stays, and so does the error that ended it.
        log.warning("%s: close failed: %s: %s", _flag(config), type(error).__name__, error)


def _asking(config: Config, sample: Sample) -> AbstractContextManager[None]:
    """Around a call of the world's code."""
    return own_code(_flag(config), f", for sample {sample.index}; {DROP_HINT}")


@contextmanager
def _rendering(config: Config) -> Iterator[None]:
    """Around what is made of the world's messages, which a template may refuse in any way."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{_flag(config)}: its messages cannot be rendered: {error}") from error


def _flag(config: Config) -> str:
    return f"--environment-path {config.agent.environment_path}"
