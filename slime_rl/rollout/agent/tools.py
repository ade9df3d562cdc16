"""Tools that a policy may call: what it is shown of them, and what happens when it calls one.

    metadata["tools"] of the row, else --tools ──► schemas in the prompt
    call ──► known? arguments JSON? ──► fenced process (def), this process (async def), MCP server ──► text

Whatever goes wrong is text that begins with "Error:", for the policy to read; it never ends the episode.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from slime_rl.config import Config
from slime_rl.config.agent import AgentConfig
from slime_rl.config.checks import read_text
from slime_rl.rollout.agent.mcp import McpError, McpServer
from slime_rl.rollout.agent.parsing import MAX_DEPTH, ToolCall, depth_of
from slime_rl.rollout.rewards.fence import current_fence

Schema = dict[str, Any]
FENCED = "slime_rl.rollout.agent.fenced_call:call"
BUILTIN = {
    "calculator": "slime_rl.rollout.agent.builtin_tools:calculator",
    "python": "slime_rl.rollout.agent.builtin_tools:python",
}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
SERVER_START_S = 30.0
LATE_S = 0.5  # of an async tool past its deadline: other work of the event loop, not a tool that blocks it
_ENTRY_KEYS = {"name", "function", "timeout_s", "schema", "description"}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. A plain function runs in a fenced process, an async one in the rollout process, or `server` has it."""

    name: str
    function: str  # package.module:name; empty for a tool of a server
    schema: Schema  # as in the OpenAI API: {"type": "function", "function": {...}}
    timeout_s: float
    is_async: bool = False
    server: McpServer | None = None


@dataclass(frozen=True, kw_only=True)
class ToolAnswer:
    text: str
    failed: bool = False


class ToolSet:
    """Every tool that a run knows, by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._left_behind: set[asyncio.Task[ToolAnswer]] = set()  # asyncio itself holds tasks weakly

    def schemas(self, entries: Sequence[str | Schema], where: str) -> list[Schema]:
        """JSON schemas for names (looked up here) and schemas (taken as they are).

        Raises:
            ValueError: a name that is not known, or an entry that is neither; names `where` it stands.
        """
        found = []
        for entry in entries:
            if isinstance(entry, str):
                if entry not in self.tools:
                    raise ValueError(f"{where}: there is no tool {entry!r}; known are {', '.join(sorted(self.tools))}")
                found.append(self.tools[entry].schema)
            else:
                found.append(_checked(entry, f"{where}: a tool is a name or"))
        return found

    async def call(self, call: ToolCall, allowed: Sequence[str]) -> ToolAnswer:
        """Run one call; failures are answers too."""
        tool = self.tools.get(call.name)
        if tool is None or call.name not in allowed:
            known = sorted(self.tools.keys() & set(allowed))  # a row may show schemas that nothing stands behind
            return _error(f"there is no tool {call.name!r}; known are {', '.join(known) or 'none'}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return _error(f"the arguments are not JSON: {error}")
        if not isinstance(arguments, dict):
            return _error(f"the arguments must be a JSON object, got {call.arguments}")
        if depth_of(arguments) > MAX_DEPTH:
            return _error(f"the arguments nest deeper than {MAX_DEPTH}")
        if tool.server is not None or tool.is_async:
            return await self._run_here(tool, arguments)
        return await self._run_fenced(tool, arguments)

    async def _run_fenced(self, tool: Tool, arguments: dict[str, Any]) -> ToolAnswer:
        answer = await current_fence().call(FENCED, tool.function, arguments, timeout_s=tool.timeout_s)
        if answer.failure is None:
            return ToolAnswer(text=str(answer.value))
        if answer.failure == "timeout":
            return _error(f"{tool.name} gave no answer within {tool.timeout_s:g} s")
        return _error(answer.message or str(answer.failure))

    async def _run_here(self, tool: Tool, arguments: dict[str, Any]) -> ToolAnswer:
        """In a task of its own, which is left behind when it goes on in spite of being cancelled at its deadline."""
        task = asyncio.create_task(_guarded(tool, arguments))
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        deadline = asyncio.get_running_loop().time() + tool.timeout_s
        try:
            await asyncio.wait({task}, timeout=tool.timeout_s)
        finally:
            task.cancel()
        if not task.done() or asyncio.get_running_loop().time() > deadline + LATE_S:
            return _error(f"{tool.name} gave no answer within {tool.timeout_s:g} s")
        return task.result()


async def _guarded(tool: Tool, arguments: dict[str, Any]) -> ToolAnswer:
    try:
        if tool.server is not None:
            value = await tool.server.call(tool.name, arguments, tool.timeout_s)
        else:
            value = await load_function(tool.function, tool.name)(**arguments)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except KeyboardInterrupt:
        raise
    except TimeoutError:
        return _error(f"{tool.name} gave no answer within {tool.timeout_s:g} s")
    except BaseException as error:  # a tool may raise anything, SystemExit too; the policy reads it
        return _error(f"{type(error).__name__}: {error}")
    return ToolAnswer(text=text)


def row_tools(config: Config, metadata: dict[str, Any]) -> list[Schema] | None:
    """JSON schemas of the tools that a prompt is shown: its own metadata["tools"], else --tools; None for none."""
    entries = metadata.get("tools", config.agent.tools)
    if not entries:
        return None
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"metadata['tools'] must be a list of names or schemas, got {entries!r}")
    return tool_set(config.agent).schemas(entries, "metadata['tools']" if "tools" in metadata else "--tools")


@lru_cache(maxsize=4)
def tool_set(config: AgentConfig) -> ToolSet:
    """Built-in tools and those of --tool-config, loaded and checked.

    Raises:
        ValueError: an entry that is wrong; names file, entry and rule.
    """
    tools = [_tool({"name": name, "function": spec}, config.tool_timeout_s, name) for name, spec in BUILTIN.items()]
    if config.tool_config is not None:
        tools += _read_file(Path(config.tool_config), config.tool_timeout_s)
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        known = "it is built in" if twice in BUILTIN else "two entries have it"
        raise ValueError(f"--tool-config {config.tool_config}: the name {twice!r} is taken: {known}")
    return ToolSet(tools)


def _read_file(path: Path, timeout_s: float) -> list[Tool]:
    where = f"--tool-config {path}"
    try:
        content = yaml.safe_load(read_text("--tool-config", path))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{where}: is not YAML: {error}") from error
    if not isinstance(content, dict) or not content or not content.keys() <= {"tools", "mcp"}:
        raise ValueError(f"{where}: must have a list under 'tools', under 'mcp', or both, got {content!r}")
    for key, entries in content.items():
        if not isinstance(entries, list):
            raise ValueError(f"{where}: must have a list under {key!r}, got {entries!r}")
    found = [_tool(entry, timeout_s, f"{where}: entry {n}") for n, entry in enumerate(content.get("tools", []), 1)]
    for number, entry in enumerate(content.get("mcp", []), 1):
        found += _server_tools(entry, timeout_s, f"{where}: mcp entry {number}")
    return found


def _server_tools(entry: Any, timeout_s: float, where: str) -> list[Tool]:
    """The tools of one MCP server, which is started to ask it."""
    command = entry.get("command") if isinstance(entry, dict) else None
    if not isinstance(command, list) or not command or not entry.keys() <= {"command", "timeout_s"}:
        raise ValueError(f"{where}: needs 'command' (a list) and may have 'timeout_s', got {entry!r}")
    seconds = _seconds(entry, timeout_s, where)
    server = McpServer([str(word) for word in command], max(seconds, SERVER_START_S))
    try:
        schemas = server.tools()
    except McpError as error:
        server.close()
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    names = [schema["function"]["name"] for schema in schemas]
    return [
        Tool(name=name, function="", schema=schema, timeout_s=seconds, server=server)
        for name, schema in zip(names, schemas, strict=True)
    ]


def _tool(entry: Any, timeout_s: float, where: str) -> Tool:
    if not isinstance(entry, dict) or not {"name", "function"} <= entry.keys() or not entry.keys() <= _ENTRY_KEYS:
        raise ValueError(f"{where}: needs 'name' and 'function' and may have {sorted(_ENTRY_KEYS)}, got {entry!r}")
    for key in ("name", "function", "description"):
        if not isinstance(entry.get(key, "text"), str) or entry.get(key) == "":
            raise ValueError(f"{where}: {key!r} must be a text, got {entry[key]!r}")
    seconds = _seconds(entry, timeout_s, where)
    function = load_function(entry["function"], where)
    if "schema" in entry:
        schema = _checked(entry["schema"], f"{where}: 'schema' is")
        if schema["function"]["name"] != entry["name"]:
            raise ValueError(f"{where}: 'schema' names {schema['function']['name']!r}, the entry {entry['name']!r}")
    else:
        schema = schema_of(function, entry["name"], where)
    if "description" in entry:
        schema = {**schema, "function": {**schema["function"], "description": entry["description"]}}
    is_async = inspect.iscoroutinefunction(function)
    return Tool(name=entry["name"], function=entry["function"], schema=schema, timeout_s=seconds, is_async=is_async)


def _seconds(entry: Schema, default: float, where: str) -> float:
    seconds = entry.get("timeout_s", default)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"{where}: 'timeout_s' must be > 0 and finite, got {seconds!r}")
    return float(seconds)


def _checked(schema: Any, what: str) -> Schema:
    """A schema as in the OpenAI API, which has a name at least. Raises ValueError that begins with `what`."""
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{what} a schema with 'function', which has a 'name', got {schema!r}")
    return schema


def load_function(spec: str, where: str) -> Any:
    """The function `package.module:name`. Raises ValueError with `where` when it cannot be had."""
    module, colon, name = spec.partition(":")
    try:
        if not colon:
            raise ValueError("write package.module:name")
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # user code may raise anything at import
        raise ValueError(f"{where}: cannot load {spec!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"{where}: {spec!r} is a {type(function).__name__}, not a function")
    return function


def schema_of(function: Any, name: str, where: str) -> Schema:
    """JSON schema from a function's signature and the first paragraph of its docstring."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # hints are expressions of the user's
        raise ValueError(
            f"{where}: the type hints of {name!r} cannot be read ({type(error).__name__}: {error}); give it a 'schema'"
        ) from error
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints.get(parameter.name, str)
        json_type = _JSON_TYPES.get(typing.get_origin(kind) or kind)
        if json_type is None:
            raise ValueError(f"{where}: no JSON type for {parameter.name}: {kind}; give the entry a 'schema'")
        properties[parameter.name] = {"type": json_type}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    text = (inspect.getdoc(function) or name).split("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def _error(text: str) -> ToolAnswer:
    return ToolAnswer(text=f"Error: {text}", failed=True)
