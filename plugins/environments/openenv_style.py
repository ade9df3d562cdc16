"""Adapter for environments behind HTTP in the manner of OpenEnv: POST /reset and POST /step.

    --generate-function-path environment_loop
    --environment-path plugins.environments.openenv_style:OpenEnvEnvironment --rm-type episode

A row names the server: metadata {"environment": {"url": "http://127.0.0.1:8000", "text": "echoed_message", "action":
"message", "reset": {"seed": 3}}}. `text` is the field of an observation that the policy reads, `action` the field of an
action that takes its answer. Both sides answer {"observation": {…}, "reward": number or null, "done": true or false}.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from plugins.environments.http import post_json
from slime_rl.config import Config
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample


class OpenEnvEnvironment:
    """One episode on a server; --tool-timeout-s bounds each request."""

    def __init__(self, config: Config, sample: Sample) -> None:
        told = sample.metadata.get("environment")
        if not isinstance(told, dict) or not {"url", "text", "action"} <= told.keys():
            raise ValueError(
                f"a row needs metadata['environment'] with url, text and action, got {told!r} in sample {sample.index}"
            )
        self.told = told
        timeout = aiohttp.ClientTimeout(total=config.agent.tool_timeout_s)
        self.http = aiohttp.ClientSession(timeout=timeout)

    async def reset(self) -> EnvironmentStart:
        answer = await self._post("reset", self.told.get("reset", {}))
        return EnvironmentStart(messages=self._messages(answer))

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        answer = await self._post("step", {"action": {self.told["action"]: action["content"]}})
        reward, done = answer.get("reward"), answer.get("done")  # of other types: --environment-path says so
        return EnvironmentStep(
            messages=self._messages(answer),
            reward=0.0 if reward is None else reward,
            done=False if done is None else done,
        )

    async def close(self) -> None:
        await self.http.close()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.told['url'].rstrip('/')}/{path}"
        return await post_json(self.http, url, body)

    def _messages(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise ValueError(f"{self.told['url']} answered an observation that is no object: {observation!r}")
        return [{"role": "user", "content": str(observation.get(self.told["text"], ""))}]
