"""OpenAI's chat completions in terms of `Session.complete`: requests read, answers and streams written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from slime_rl.rollout.agent.gateway.sessions import GatewayError, Turn
from slime_rl.rollout.agent.template import Message


def read_request(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Session.complete`. Sampling settings but length and stop strings are the run's, not the agent's.

    Raises:
        GatewayError: a body that is no chat completion, or asks for what cannot be recorded (n > 1).
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise GatewayError(400, "messages must be a list with at least one message")
    if body.get("n") not in (None, 1):
        raise GatewayError(400, f"n must be 1, got {body['n']}")
    stop = body.get("stop")
    return {
        "messages": [read_message(message) for message in messages],
        "tools": body.get("tools") or None,
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens"),
        "stop": [stop] if isinstance(stop, str) else stop,
    }


def read_message(message: Any) -> Message:
    """One message with text for content: parts are joined, `developer` is what templates know as `system`."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise GatewayError(400, f"a message needs a role, got {message!r}")
    role = "system" if message["role"] == "developer" else message["role"]
    read: Message = {"role": role, "content": text_of(message.get("content"))}
    for key in ("tool_calls", "tool_call_id", "name", "reasoning_content"):
        if message.get(key):
            read[key] = message[key]
    return read


def text_of(content: Any) -> str:
    """Text of a content that is a string, nothing, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, dict) or "text" not in part:
            raise GatewayError(400, f"only text can be rendered, got a part {part!r}")
        texts.append(part["text"])
    return "".join(texts)


def tool_calls_of(turn: Turn) -> list[dict[str, Any]]:
    """Calls in the API's form: arguments are text."""
    ids = [call["id"] for call in turn.answer.get("tool_calls", [])]
    ids = ids or [f"call{len(turn.keys):02d}{i:03d}" for i in range(len(turn.parsed.calls))]
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


def stream(turn: Turn, identity: str, model: str) -> Iterator[str]:
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
    yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(turn)})}\n\n"
    yield "data: [DONE]\n\n"
