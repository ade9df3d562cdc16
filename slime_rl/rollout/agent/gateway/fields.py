"""What a client may send, checked before anything is made of it: what is wrong is a 400 that says so, never a 500."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime_rl.rollout.agent.gateway.sessions import GatewayError
from slime_rl.rollout.agent.parsing import MAX_DEPTH, depth_of, is_unicode
from slime_rl.rollout.agent.template import Message

ROLES = ("system", "user", "assistant", "tool")
MAX_BODY_DEPTH = 128  # of JSON that is read; templates and JSON itself are recursive


def text(value: Any, where: str) -> str:
    """A text without lone surrogates."""
    if not isinstance(value, str) or not is_unicode(value):
        raise GatewayError(400, f"{where} must be a text, got {short(value)}")
    return value


def items(value: Any, where: str) -> list[Any]:
    """A list; nothing for null."""
    if value is not None and not isinstance(value, list):
        raise GatewayError(400, f"{where} must be a list, got {short(value)}")
    return value or []


def record(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GatewayError(400, f"{where} must be an object, got {short(value)}")
    return value


def flag(value: Any, where: str) -> bool:
    """A boolean; False for null."""
    if value is not None and not isinstance(value, bool):
        raise GatewayError(400, f"{where} must be true or false, got {short(value)}")
    return bool(value)


def count(body: dict[str, Any], *names: str) -> int | None:
    """The first of the fields `names` that is given: a whole number above zero."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GatewayError(400, f"{name} must be a whole number of at least 1, got {short(value)}")
        return value
    return None


def stop_texts(value: Any, where: str) -> list[str]:
    """A text or a list of texts, as a list."""
    given = [value] if isinstance(value, str) else items(value, where)
    if not all(given):
        raise GatewayError(400, f"{where} must not have an empty text")
    return [text(stop, where) for stop in given]


def content_text(content: Any) -> str:
    """Text of a content that is a string, nothing, or a list of text parts."""
    if content is None or isinstance(content, str):
        return text(content or "", "content")
    if not isinstance(content, list):
        raise GatewayError(400, f"content must be a text or a list of parts, got {short(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or "text" not in part:
            raise GatewayError(400, f"only text can be rendered, got a part {short(part)}")
        texts.append(text(part["text"], "the text of a part"))
    return "".join(texts)


def role_of(message: Any) -> str:
    """The role of a message; `developer` is what templates know as `system`."""
    role = record(message, "a message").get("role")
    if role == "developer":
        return "system"
    if role not in ROLES:
        raise GatewayError(400, f"the role of a message must be one of {', '.join(ROLES)}, got {short(role)}")
    return role


def tool_call(identity: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call as a message has it; its arguments are text of JSON, as the APIs send it, or text that is none."""
    given = text(arguments, "the arguments of a tool call")
    try:
        value = json.loads(given or "{}")
    except RecursionError:
        raise GatewayError(400, f"the arguments of a tool call nest deeper than {MAX_DEPTH}") from None
    except ValueError:
        value = None  # shown as it is
    if depth_of(value) > MAX_DEPTH:
        raise GatewayError(400, f"the arguments of a tool call nest deeper than {MAX_DEPTH}")
    text(json.dumps(value, ensure_ascii=False), "the arguments of a tool call")
    function = {"name": text(name, "the name of a tool call"), "arguments": given}
    return {"id": text(identity, "the id of a tool call"), "type": "function", "function": function}


def tool_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as templates are shown it; what is None is left out."""
    function: dict[str, Any] = {"name": text(name, "the name of a tool")}
    if description is not None:
        function["description"] = text(description, "the description of a tool")
    if parameters is not None:
        function["parameters"] = record(parameters, "the schema of a tool")
        text(json.dumps(parameters, ensure_ascii=False), "the schema of a tool")
    return {"type": "function", "function": function}


def conversation(messages: Sequence[Message]) -> list[Message]:
    """At least one message."""
    if not messages:
        raise GatewayError(400, "there must be at least one message")
    return list(messages)


def short(value: Any) -> str:
    """The beginning of a value, for an error."""
    shown = ascii(value)
    return shown if len(shown) <= 200 else shown[:200] + "…"
