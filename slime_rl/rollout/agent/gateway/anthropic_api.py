"""Anthropic's messages in terms of `Session.complete`: requests read, answers and streams written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slime_rl.rollout.agent.gateway import fields
from slime_rl.rollout.agent.gateway.openai_api import tool_calls_of
from slime_rl.rollout.agent.gateway.sessions import GatewayError, Turn
from slime_rl.rollout.agent.template import Message


def read_request(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Session.complete`.

    Raises:
        GatewayError: a body that is no messages request.
    """
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": fields.content_text(body["system"])})
    for message in fields.conversation(fields.items(body.get("messages"), "messages")):
        messages += read_message(message)
    choice = fields.record(body.get("tool_choice") or {}, "tool_choice")
    return {
        "messages": messages,
        "tools": [read_tool(tool) for tool in fields.items(body.get("tools"), "tools")] or None,
        "max_tokens": fields.count(body, "max_tokens"),
        "stop": fields.stop_texts(body.get("stop_sequences"), "stop_sequences"),
        "calls": choice.get("type") != "none",
    }


def read_tool(tool: Any) -> dict[str, Any]:
    kind = fields.record(tool, "a tool").get("type")
    if kind not in (None, "custom"):
        raise GatewayError(400, f"there are no tools of type {fields.short(kind)} here")
    schema = tool.get("input_schema", {"type": "object", "properties": {}})
    return fields.tool_schema(tool.get("name"), tool.get("description") or "", schema)


def read_message(message: Any) -> list[Message]:
    """One message as ours: tool results become messages of their own, before the text beside them."""
    role, content = fields.role_of(message), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": fields.text(content, "content")}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for block in fields.items(content, "content"):
        kind = fields.record(block, "a block").get("type")
        if kind == "text":
            texts.append(fields.text(block.get("text"), "the text of a block"))
        elif kind == "tool_use":
            calls.append(fields.tool_call(block.get("id"), block.get("name"), _arguments(block.get("input"))))
        elif kind == "tool_result":
            identity = fields.text(block.get("tool_use_id"), "tool_use_id")
            told = fields.content_text(block.get("content"))
            results.append({"role": "tool", "tool_call_id": identity, "content": told})
        elif kind not in ("thinking", "redacted_thinking"):  # a thought that we gave: the conversation knows it
            raise GatewayError(400, f"blocks of type {fields.short(kind)} cannot be rendered")
    own: list[Message] = []
    if texts or calls or not results:
        own = [{"role": role, "content": "".join(texts)}]
        if calls:
            own[0]["tool_calls"] = calls
    return results + own


def blocks_of(turn: Turn) -> list[dict[str, Any]]:
    """Content blocks of an answer."""
    blocks: list[dict[str, Any]] = []
    if turn.parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.parsed.reasoning, "signature": ""})
    if turn.parsed.content or not turn.parsed.calls:
        blocks.append({"type": "text", "text": turn.parsed.content})
    for call in tool_calls_of(turn):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _object(function)})
    return blocks


def _object(function: dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": function["arguments"]}


def _arguments(value: Any) -> str:
    """The text of a call's arguments: what `_object` was given, also where that was no object."""
    value = fields.record(value, "the input of a tool_use")
    inner = value.get("arguments")
    if len(value) == 1 and isinstance(inner, str) and _object({"arguments": inner}) == value:
        return inner
    return json.dumps(value)


def stop_reason(turn: Turn) -> str:
    if turn.finish_reason == "length":
        return "max_tokens"
    if turn.parsed.calls:
        return "tool_use"
    return "end_turn" if turn.stopped_by is None else "stop_sequence"


def message_of(turn: Turn, identity: str, model: str) -> dict[str, Any]:
    """The answer to a call without stream."""
    return {
        "id": f"msg_{identity}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks_of(turn),
        "stop_reason": stop_reason(turn),
        "stop_sequence": turn.stopped_by,
        "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": len(turn.sampled)},
    }


def stream(turn: Turn, identity: str, model: str, body: dict[str, Any]) -> Iterator[str]:
    """Server-sent events of the same answer. The answer is whole before the first one is sent."""
    whole = message_of(turn, identity, model)

    def event(kind: str, **content: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"

    yield event("message_start", message={**whole, "content": [], "stop_reason": None, "stop_sequence": None})
    for index, block in enumerate(whole["content"]):
        text_key = {"text": "text", "thinking": "thinking"}.get(block["type"])
        if text_key:
            start, delta = {**block, text_key: ""}, {"type": f"{text_key}_delta", text_key: block[text_key]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=start)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield event("message_delta", delta=ending, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield event("message_stop")
