"""Agents that run as they are, against the gateway: `--generate-function-path gateway --agent-path package.module:run`.

run(data, base_url, api_key) ──HTTP──► gateway ──► engines        returns the reward, or None when it posts it itself
                                          └──► samples of the session
"""

from __future__ import annotations

import copy
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import Agent
from slime_rl.registry import ExtensionPoint, own_code
from slime_rl.rollout.generate import DROP_HINT
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status, finite_number

AGENTS = ExtensionPoint(flag="--agent-path", protocol=Agent, builtins={})


async def gateway(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Run the agent of --agent-path once and take its conversation(s) as samples of one episode.

    `data` has `prompt`, `label`, `metadata` and `root_url` (for clients that add /v1 themselves). The reward is what
    the agent returns (a dict gives one to each role), or what it posts to `base_url`/session/reward; `--rm-type
    episode` reads it. When the run interrupts the sample, whatever the agent makes of it, it comes back as ABORTED and
    starts anew later: an agent's own state cannot be continued.

    Raises:
        ValueError: the agent raised, made no call, or returned something that is no finite number; names the flag.
    """
    server = current_runtime().gateway
    if server is None:
        raise ValueError("no gateway here: the run's owner starts one when --agent-path is given")
    agent = load_agent(config)
    data = {
        "prompt": copy.deepcopy(sample.prompt),  # agents go on with the list that they are given
        "label": copy.deepcopy(sample.label),
        "metadata": copy.deepcopy({key: value for key, value in sample.metadata.items() if key != "agent"}),
        "root_url": server.root_url,
    }
    reward: Any = None
    with server.session(sample, sampling_params) as session:
        try:
            with own_code(_flag(config), f", for sample {sample.index}; {DROP_HINT}"):
                reward = await agent(data, server.base_url, session.key)
        except ValueError:
            if not session.interrupted:  # else its client was refused: not the agent's mistake
                raise
    if session.interrupted:  # also where the agent took the refusal for an end, or for a loss
        sample.status = Status.ABORTED
        return sample
    if isinstance(reward, dict):
        if not all(isinstance(role, str) for role in reward):
            raise ValueError(f"{_flag(config)} must return rewards by the names of roles, got {reward!r:.300}")
        session.role_rewards |= {role: _number(config, value) for role, value in reward.items()}
    elif reward is not None:
        session.reward = _number(config, reward)
    return session.samples()


def load_agent(config: Config) -> Agent:
    """The function of --agent-path. Raises ValueError when there is none or it does not fit."""
    if config.agent.agent_path is None:
        raise ValueError("--generate-function-path gateway needs --agent-path: the agent to run")
    return AGENTS.load(config.agent.agent_path)


def _number(config: Config, reward: Any) -> float:
    number = finite_number(reward)
    if number is None:
        raise ValueError(f"{_flag(config)} must return a finite number or None, got {reward!r:.300}")
    return number


def _flag(config: Config) -> str:
    return f"--agent-path {config.agent.agent_path}"
