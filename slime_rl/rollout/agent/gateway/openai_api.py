"""OpenAI's chat completions in terms of `Session.complete`: requests read, answers and streams written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from slime_rl.rollout.agent.gateway import fields
from slime_rl.rollout.agent.gateway.sessions import GatewayError, Turn
from slime_rl.rollout.agent.parsing import call_id
from slime_rl.rollout.agent.template import Message


def read_request(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Session.complete`. Sampling settings but length and stop strings are the run's, not the agent's.

    Raises:
        GatewayError: a body that is no chat completion, or asks for what cannot be recorded (n > 1).
    """
    messages = [read_message(message) for message in fields.items(body.get("messages"), "messages")]
    if body.get("n") not in (None, 1):
        raise GatewayError(400, f"n must be 1, got {fields.short(body['n'])}")
    fields.record(body.get("stream_options") or {}, "stream_options")
    return {
        "messages": fields.conversation(messages),
        "tools": [read_tool(tool) for tool in fields.items(body.get("tools"), "tools")] or None,
        "max_tokens": fields.count(body, "max_completion_tokens", "max_tokens"),
        "stop": fields.stop_texts(body.get("stop"), "stop"),
        "calls": body.get("tool_choice") != "none",
    }


def read_tool(tool: Any) -> dict[str, Any]:
    function = fields.record(fields.record(tool, "a tool").get("function"), "the function of a tool")
    fields.tool_schema(function.get("name"), function.get("description"), function.get("parameters"))
    return tool


def read_message(message: Any) -> Message:
    """One message with text for content: parts are joined."""
    role = fields.role_of(message)
    read: Message = {"role": role, "content": fields.content_text(message.get("content"))}
    for key in ("tool_call_id", "name", "reasoning_content"):
        if message.get(key):
            read[key] = fields.text(message[key], key)
    calls = [fields.record(call, "a tool call") for call in fields.items(message.get("tool_calls"), "tool_calls")]
    if calls:
        read["tool_calls"] = [_read_call(call) for call in calls]
    return read


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = fields.record(call.get("function"), "the function of a tool call")
    arguments = function.get("arguments") or ""
    if isinstance(arguments, dict):  # not as the API has it, but as some clients do
        arguments = json.dumps(arguments)
    return fields.tool_call(call.get("id") or "", function.get("name"), arguments)


def tool_calls_of(turn: Turn) -> list[dict[str, Any]]:
    """Calls in the API's form: arguments are text."""
    ids = [call["id"] for call in turn.answer.get("tool_calls", [])]
    ids = ids or [call_id(turn.index, i) for i in range(len(turn.parsed.calls))]
    return [
        {"id": i, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in zip(ids, turn.parsed.calls, strict=True)
    ]


def finish_reason(turn: Turn) -> str:
    return "length" if turn.finish_reason == "length" else "tool_calls" if turn.parsed.calls else "stop"


def usage(turn: Turn) -> dict[str, int]:
    prompt, completion = turn.num_prompt_tokens, len(turn.sampled)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def completion(turn: Turn, identity: str, model: str) -> dict[str, Any]:
    """The answer to a call without stream."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.parsed.content}
    if turn.parsed.reasoning:
        message["reasoning_content"] = turn.parsed.reasoning
    if turn.parsed.calls:
        message["content"] = turn.parsed.content or None
        message["tool_calls"] = tool_calls_of(turn)
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(turn), "logprobs": None}
    head = {"id": f"chatcmpl-{identity}", "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": [choice], "usage": usage(turn)}


def stream(turn: Turn, identity: str, model: str, body: dict[str, Any]) -> Iterator[str]:
    """Server-sent events of the same answer. The answer is whole before the first one is sent."""
    head: dict[str, Any] = {"id": f"chatcmpl-{identity}", "object": "chat.completion.chunk"}
    head |= {"created": int(time.time()), "model": model}

    def event(delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    yield event({"role": "assistant", "content": ""})
    if turn.parsed.reasoning:
        yield event({"reasoning_content": turn.parsed.reasoning})
    if turn.parsed.content:
        yield event({"content": turn.parsed.content})
    for index, call in enumerate(tool_calls_of(turn)):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, finish_reason(turn))
    if (body.get("stream_options") or {}).get("include_usage"):  # a chunk without choices surprises who has not asked
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(turn)})}\n\n"
    yield "data: [DONE]\n\n"
