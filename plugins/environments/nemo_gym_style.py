"""Adapter for resources servers in the manner of NeMo Gym: tools and verifier behind HTTP.

    --generate-function-path environment_loop
    --environment-path plugins.environments.nemo_gym_style:NemoGymEnvironment --rm-type episode

A row names the server and holds the task as NeMo Gym's data files do: metadata {"environment": {"url":
"http://127.0.0.1:8000", "row": {"responses_create_params": {"input": […], "tools": […]}, …}}}. The server answers
POST /seed_session (and sets a cookie), POST /TOOL with the arguments of a call, and POST /verify with the row and the
whole response in OpenAI's Responses format, which gives {"reward": number}. It is verified after the first turn without
a call; an episode that a limit ends is worth 0.
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import aiohttp

from plugins.environments.http import post_json
from slime_rl.config import Config
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample

RESERVED = {"seed_session", "verify"}
TRIES = 3  # of those two: a server that fails once must not end the run


class NemoGymEnvironment:
    """One task on a server; --tool-timeout-s bounds each request."""

    def __init__(self, config: Config, sample: Sample) -> None:
        told = sample.metadata.get("environment")
        if not isinstance(told, dict) or not {"url", "row"} <= told.keys():
            raise ValueError(f"a row needs metadata['environment'] with url and row, got {told!r} in {sample.index}")
        self.url, self.row = told["url"].rstrip("/"), told["row"]
        self.names: set[str] = set()  # of the tools that the row declares
        self.output: list[dict[str, Any]] = []  # of the response so far, in the Responses format
        self.http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=config.agent.tool_timeout_s),
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # "unsafe": also of servers that are named by their address
        )

    async def reset(self) -> EnvironmentStart:
        await self._verdict("seed_session", self.row)
        asked = self.row["responses_create_params"]
        messages = asked["input"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if asked.get("instructions"):
            messages = [{"role": "system", "content": asked["instructions"]}, *messages]
        tools = [
            {"type": "function", "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}
            for tool in asked.get("tools") or []
        ]
        self.names = {tool["function"]["name"] for tool in tools}
        if reserved := self.names & RESERVED:
            raise ValueError(f"{self.url}: a tool cannot be named {sorted(reserved)[0]!r}, the server's own path")
        return EnvironmentStart(messages=[_message(message) for message in messages], tools=tools or None)

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        calls = action.get("tool_calls") or []
        if action["content"] or not calls:
            text = {"type": "output_text", "text": action["content"], "annotations": []}
            item = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
            self.output.append({"id": f"msg_{len(self.output)}", **item})
        if not calls:
            verdict = await self._verdict("verify", {**self.row, "response": self._response()})
            return EnvironmentStep(reward=verdict.get("reward"), done=True)  # type: ignore[arg-type]  # checked there
        return EnvironmentStep(messages=[await self._call(call) for call in calls])

    async def close(self) -> None:
        await self.http.close()

    async def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The tool's answer; what the server refuses is for the policy to read."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        item = {"type": "function_call", "name": name, "arguments": text, "call_id": call["id"], "status": "completed"}
        self.output.append({"id": f"fc_{len(self.output)}", **item})
        if name not in self.names:  # only these: the policy must not reach the verifier, or any other path
            result = f"Error: there is no tool {name!r}; known are {', '.join(sorted(self.names)) or 'none'}"
        elif not isinstance(arguments, dict):
            result = "Error: the arguments are not a JSON object"
        else:
            result = await self._ask(name, arguments)
        self.output.append({"type": "function_call_output", "call_id": call["id"], "output": result})
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}

    def _response(self) -> dict[str, Any]:
        return {
            "id": "resp_0",
            "object": "response",
            "created_at": int(time.time()),
            "model": "policy",
            "output": self.output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.row["responses_create_params"].get("tools") or [],
        }

    async def _ask(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            async with self.http.post(f"{self.url}/{quote(name, safe='')}", json=arguments) as answer:
                return await answer.text(errors="replace")
        except TimeoutError:
            return f"Error: {name} gave no answer within {self.http.timeout.total:g} s"
        except aiohttp.ClientError as error:
            return f"Error: {type(error).__name__}: {error}"

    async def _verdict(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await post_json(self.http, f"{self.url}/{path}", body, TRIES)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As chat templates know it: a developer is the system, parts of text are one text."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {"role": "system" if message["role"] == "developer" else message["role"], "content": content}
