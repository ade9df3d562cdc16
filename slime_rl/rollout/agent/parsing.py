"""What the policy wrote in one turn: its reasoning, its text and its tool calls.

The formats themselves are SGLang's; the engine room wraps its parsers as a `TurnParser` and the rollout manager puts it
into the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_rl.rollout.agent.template import Message

# Values of --generate-function-path that take turns apart, so that the parser's name is checked before a run starts.
NEED_PARSER = ("agent_loop", "environment_loop", "gateway", "slime_rl.rollout.agent:agent_loop")


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call that the policy asks for; `arguments` is the JSON text that it wrote."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """A turn taken apart. `malformed` says that it tried a tool call of which nothing could be read."""

    content: str
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    malformed: bool = False


class TurnParser(Protocol):
    """Takes turns apart by the formats of --tool-call-parser and --reasoning-parser."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        """`text` of one turn without its end token; `tools` are the JSON schemas that the policy was shown."""
        ...


def call_id(turn: int, position: int) -> str:
    """Nine letters and digits, which is the form that every template accepts."""
    return f"call{turn:02d}{position:03d}"


def assistant_message(parsed: ParsedTurn, turn: int) -> Message:
    """The turn as a chat message, arguments parsed where they are JSON."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call_id(turn, i),
                "type": "function",
                "function": {"name": call.name, "arguments": _object_or_text(call.arguments)},
            }
            for i, call in enumerate(parsed.calls)
        ]
    return message


def _object_or_text(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
