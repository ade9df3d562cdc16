"""A tokenizer's chat template as text, with what it can show of tool calls found out by asking it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

Message = dict[str, Any]  # a chat message as in the OpenAI API: role, content, tool_calls, tool_call_id, …
Arguments = Literal["object", "string", "none"]


class ChatTemplate:
    """Renders messages to text. `tools` are JSON schemas as in the OpenAI API; `options` go to the template.

    `arguments` says how the template takes the arguments of a tool call: as an object, as a string of JSON, or not at
    all (`none`: it shows only the text of messages, so that calls must stay in the assistant's content).
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[dict[str, Any]] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.options = options or {}
        self.arguments: Arguments = arguments_form(tokenizer, tokenizer.chat_template)

    def text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as text.

        Raises:
            ValueError: the template rejects the messages.
        """
        try:
            return self._render([self.adapted(message) for message in messages], add_generation_prompt)
        except Exception as error:  # templates raise their own kinds of errors
            raise ValueError(f"the chat template rejects a message: {type(error).__name__}: {error}") from error

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, add_generation_prompt=add_generation_prompt, tokenize=False, **self.options
        )

    def adapted(self, message: Message) -> Message:
        """Tool-call arguments in the form that the template takes; other messages as they are."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        adapted = []
        for call in calls:
            function = dict(call["function"])
            arguments = function.get("arguments", {})
            if self.arguments == "string" and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif self.arguments == "object" and isinstance(arguments, str):
                function["arguments"] = _parsed(arguments)
            adapted.append({**call, "function": function})
        return {**message, "tool_calls": adapted}


@lru_cache(maxsize=4)
def arguments_form(tokenizer: Any, chat_template: Any) -> Arguments:
    """How a template takes the arguments of a tool call, by rendering one; `chat_template` is for the cache's key."""
    mark = f"M{secrets.token_hex(8)}"
    forms: tuple[tuple[Arguments, Any], ...] = (("object", {"a": mark}), ("string", json.dumps({"a": mark})))
    for form, arguments in forms:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": "u"}, assistant], tokenize=False)
        except Exception:  # templates raise their own kinds of errors; the next form may suit
            continue
        if mark in text and f"'a': '{mark}" not in text:  # a Python dict printed is not what the model knows
            return form
    return "none"


def _parsed(arguments: str) -> Any:
    """The object in a string of JSON; the string itself when it is none (a client's mistake, still to be shown)."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
