"""OpenAI's responses in terms of `Session.complete`: requests read, answers and streams written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from slime_rl.rollout.agent.gateway import fields
from slime_rl.rollout.agent.gateway.openai_api import tool_calls_of
from slime_rl.rollout.agent.gateway.sessions import GatewayError, Turn
from slime_rl.rollout.agent.template import Message


def read_request(body: dict[str, Any], earlier: dict[str, list[Message]]) -> dict[str, Any]:
    """Arguments of `Session.complete`. `earlier` has the conversation up to each answer of the session, by its id.

    Raises:
        GatewayError: a body that is no responses request, or a previous_response_id that the session did not give.
    """
    previous = body.get("previous_response_id")
    if previous is not None and fields.text(previous, "previous_response_id") not in earlier:
        raise GatewayError(404, f"previous_response_id {previous!r} is none of this session")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else fields.items(given, "input")
    messages = [*(earlier[previous] if previous else []), *read_items(fields.conversation(items))]
    if body.get("instructions"):  # those of an earlier response do not carry over
        messages.insert(0, {"role": "system", "content": fields.text(body["instructions"], "instructions")})
    tools = [fields.record(tool, "a tool") for tool in fields.items(body.get("tools"), "tools")]
    return {
        "messages": messages,
        "tools": [
            fields.tool_schema(tool.get("name"), tool.get("description"), tool.get("parameters"))
            for tool in tools
            if tool.get("type") == "function"
        ]
        or None,
        "max_tokens": fields.count(body, "max_output_tokens"),
        "calls": body.get("tool_choice") != "none",
    }


def read_items(items: list[Any]) -> list[Message]:
    """Input items as messages; a text and the calls behind it are one turn of the assistant."""
    messages: list[Message] = []
    for item in items:
        kind = fields.record(item, "an input item").get("type", "message")
        if kind == "message":
            messages.append({"role": fields.role_of(item), "content": fields.content_text(item.get("content"))})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = fields.tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            identity, output = fields.text(item.get("call_id"), "call_id"), fields.content_text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": identity, "content": output})
        elif kind != "reasoning":  # a thought that we gave: the conversation knows it
            raise GatewayError(400, f"an input item of type {fields.short(kind)} cannot be rendered")
    return fields.conversation(messages)


def output_of(turn: Turn, identity: str) -> list[dict[str, Any]]:
    """Output items of an answer."""
    items: list[dict[str, Any]] = []
    if turn.parsed.reasoning:
        summary = [{"type": "summary_text", "text": turn.parsed.reasoning}]
        items.append({"id": f"rs_{identity}", "type": "reasoning", "summary": summary})
    if turn.parsed.content or not turn.parsed.calls:
        part = {"type": "output_text", "text": turn.parsed.content, "annotations": []}
        head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for call in tool_calls_of(turn):
        head = {"id": f"fc_{identity}_{call['id']}", "type": "function_call", "status": "completed"}
        items.append({**head, "call_id": call["id"], **call["function"]})
    return items


def response_of(turn: Turn, identity: str, model: str) -> dict[str, Any]:
    """The answer to a call without stream."""
    cut = turn.finish_reason == "length"
    prompt, completion = turn.num_prompt_tokens, len(turn.sampled)
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output_of(turn, identity),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def stream(turn: Turn, identity: str, model: str) -> Iterator[str]:
    """Server-sent events of the same answer. The answer is whole before the first one is sent."""
    whole = response_of(turn, identity, model)
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": {**whole, "status": "in_progress", "output": [], "usage": None}})
    ]
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        events.append(
            ("response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress"}})
        )
        if item["type"] == "message":
            (part,) = item["content"]
            inside = {**place, "content_index": 0}
            events.append(("response.content_part.added", {**inside, "part": {**part, "text": ""}}))
            events.append(("response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}))
            events.append(("response.output_text.done", {**inside, "text": part["text"], "logprobs": []}))
            events.append(("response.content_part.done", {**inside, "part": part}))
        elif item["type"] == "function_call":
            events.append(("response.function_call_arguments.delta", {**place, "delta": item["arguments"]}))
            events.append(("response.function_call_arguments.done", {**place, "arguments": item["arguments"]}))
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    events.append((last, {"response": whole}))
    for number, (kind, content) in enumerate(events):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **content})}\n\n"
