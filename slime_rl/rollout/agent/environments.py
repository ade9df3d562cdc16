"""Multi-turn generation in an environment: `--generate-function-path environment_loop --environment-path …`.

reset ──► prompt ──► policy's turn ──► step ──done──► reward: `--rm-type episode`
                          ▲              │
                          └── messages ◄─┘ masked
"""

from __future__ import annotations

from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import Environment
from slime_rl.registry import ExtensionPoint
from slime_rl.rollout.agent.episode import STATE_KEY, Episode
from slime_rl.rollout.agent.turns import TurnRenderer
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample, Status

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
        ValueError: a prompt over --max-prompt-len, or a step of another form; names the flag.
    """
    budget = sampling_params["max_new_tokens"] + sample.response_length
    sample.clear_response()
    world: Environment = load_environment(config)(config, sample)
    try:
        start = await world.reset()
        _check(config, "reset", start, EnvironmentStart)
        _begin(config, sample, start)
        episode = Episode(config, sample, {**sampling_params, "max_new_tokens": budget}, start.tools)
        sample.metadata[STATE_KEY]["reward"] = 0.0
        return await _play(config, world, episode)
    finally:
        await world.close()


async def _play(config: Config, world: Environment, episode: Episode) -> Sample:
    state = episode.state
    while (parsed := await episode.turn()) is not None:
        state["num_tool_calls"] += len(parsed.calls)
        state["num_tool_errors"] += int(parsed.malformed)
        step = await world.step(episode.messages[-1])
        _check(config, "step", step, EnvironmentStep)
        state["reward"] += float(step.reward)
        if step.done:
            return episode.end("done")
        if state["num_turns"] >= config.agent.max_turns:
            return episode.end("max_turns", Status.TRUNCATED)
        if not step.messages:
            raise ValueError(f"{_flag(config)}: step must give messages unless the episode is done")
        if not episode.add([{**m, "content": episode.cut(m.get("content") or "")} for m in step.messages]):
            break
    return episode.sample


def _begin(config: Config, sample: Sample, start: EnvironmentStart) -> None:
    tokens = TurnRenderer(current_runtime().tokenizer, start.tools).prompt(start.messages)
    limit = config.sampling.max_prompt_len
    if len(tokens) > limit:
        raise ValueError(f"{_flag(config)}: a prompt has {len(tokens)} tokens, over --max-prompt-len {limit}")
    sample.prompt = start.messages
    sample.set_prompt_tokens(tokens)


def _check(config: Config, method: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{_flag(config)}: {method} must return an {kind.__name__}, got {type(value).__name__}")


def _flag(config: Config) -> str:
    return f"--environment-path {config.agent.environment_path}"
