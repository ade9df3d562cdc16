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

MAX_DEPTH = 64  # of a call's arguments: what nests deeper breaks templates, JSON and pickle by their recursion

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
        """`text` of one turn without its end token; `tools` are the JSON schemas that the policy was shown.

        A call that it cannot read makes the turn malformed; see `read_turn` for what may be odd about the others.
        """
        ...


def read_turn(parser: TurnParser, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
    """The turn taken apart; malformed, with all of its text as content, where a call could not be shown again.

    Such calls have a name that is no text, arguments that nest deeper than MAX_DEPTH, or lone surrogates, which JSON
    can spell and no tokenizer and no client can take.
    """
    parsed = parser.parse(text, tools)
    if all(_can_be_shown(call) for call in parsed.calls):
        return parsed
    return ParsedTurn(content=text, reasoning=parsed.reasoning, malformed=True)


def _can_be_shown(call: ToolCall) -> bool:
    if not isinstance(call.name, str) or not isinstance(call.arguments, str):
        return False
    if not is_unicode(call.name) or not is_unicode(call.arguments):
        return False
    try:
        value = json.loads(call.arguments)
    except RecursionError:
        return False
    except ValueError:
        return True  # text that is no JSON is shown as it is
    return depth_of(value) <= MAX_DEPTH and is_unicode(json.dumps(value, ensure_ascii=False))


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    """`text` with a question mark for every lone surrogate, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


def depth_of(value: Any) -> int:
    """How deep lists and objects nest in a JSON value; found without recursion."""
    depth, layer = 0, [value]
    while layer := [x for x in layer if isinstance(x, (dict, list))]:
        depth += 1
        layer = [x for inside in layer for x in (inside.values() if isinstance(inside, dict) else inside)]
    return depth


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
