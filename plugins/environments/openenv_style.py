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
        reward = float(answer.get("reward") or 0.0)
        return EnvironmentStep(messages=self._messages(answer), reward=reward, done=bool(answer.get("done")))

    async def close(self) -> None:
        await self.http.close()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.told['url'].rstrip('/')}/{path}"
        async with self.http.post(url, json=body) as response:
            if response.status != 200:
                raise ValueError(f"{url} answered HTTP {response.status}: {(await response.text())[:300]}")
            return await response.json()

    def _messages(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": str(answer["observation"].get(self.told["text"], ""))}]
