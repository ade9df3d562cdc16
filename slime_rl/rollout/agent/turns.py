"""Token ids of a conversation that grows: each turn renders only its new messages, and no token is made twice.

    prompt(messages) ──► ids ──► engine ──► sampled ids
                          ▲                    │
                          └── + sampled + following(assistant message, new messages) ◄──

What the chat template writes between the end of the assistant's text and the next generation prompt is found by
rendering a conversation of two stand-in messages and the new ones: it is the text after a marker inside the stand-in
assistant message. That costs the new messages' length, whatever came before them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from slime_rl.data.rendering import render_prompt
from slime_rl.rollout.agent.template import ChatTemplate, Message

MAX_OVERLAP = 8  # an end of turn is one or two tokens; longer equal runs would be chance


class TurnRenderer:
    """Renders the turns of one conversation with the tokenizer's chat template.

    `tools` are JSON schemas as in the OpenAI API; `template_options` go to the template (such as enable_thinking).
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: list[dict[str, Any]] | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, tools, template_options)
        self.special_ids, self._special_texts = special_tokens(tokenizer)
        self._anchors: dict[str, list[int]] = {}  # their ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids `[P]` of the whole conversation with the prompt for the assistant's next turn.

        A last message of the assistant is continued.
        """
        adapted = [self.template.adapted(message) for message in messages]
        return render_prompt(self.tokenizer, adapted, True, self.template.tools, self.template.options)

    def whole(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Ids of the whole conversation as the template writes it."""
        return self.encode(self.template.text(messages, add_generation_prompt))

    def following(
        self, assistant: Message, sampled: Sequence[int], new: Sequence[Message], *, continue_last: bool = False
    ) -> list[int]:
        """Ids to append after `sampled`, the policy's own tokens of the turn `assistant`, before the next generation.

        They end the assistant's turn (unless the policy sampled the end itself), and hold `new` and the generation
        prompt. An end that the template does not know (such as another stop token) stays and is followed by the
        template's. With `continue_last` they end in the text of the last message, the assistant's, to be continued.

        Raises:
            ValueError: the template rejects the messages, or does not show an assistant's message before them.
        """
        end, text = self._after_assistant(assistant, list(new), continue_last)
        # Encoded behind a special token: some tokenizers treat the beginning of a text in their own way.
        anchor = end or self.tokenizer.eos_token or ""
        before = self._anchors.get(anchor)
        if before is None:
            before = self._anchors[anchor] = self.encode(anchor)
        tail = self.encode(anchor + text)[len(before) :]
        if end:
            tail = before + tail
        return tail[_overlap(sampled, tail, self.special_ids) :]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _after_assistant(self, assistant: Message, new: list[Message], continue_last: bool) -> tuple[str, str]:
        """The token that ends the assistant's turn ("" where the template has none), and the text after it."""
        mark = f"M{secrets.token_hex(8)}"
        before = [{"role": "user", "content": "u"}, self._stand_in(assistant, mark)]
        closed = self._after(mark, before, add_generation_prompt=False)
        text = self._after(mark, [*before, *new], add_generation_prompt=not continue_last)
        if continue_last:
            text = _up_to(text, new[-1]["content"])
        closing = _common_prefix(closed, text)
        eos = self.tokenizer.eos_token
        known = [token for token in self._special_texts if token in closing]
        end = eos if eos and eos in closing else max(known, key=closing.rfind, default="")
        begin = closing.rfind(end) if end else len(closing)
        return end, text[begin + len(end) :]

    def _after(self, mark: str, messages: list[Message], *, add_generation_prompt: bool) -> str:
        _, found, after = self.template.text(messages, add_generation_prompt).rpartition(mark)
        if not found:
            raise ValueError("the chat template leaves out the text of an assistant message before the last messages")
        return after

    def _stand_in(self, assistant: Message, mark: str) -> Message:
        """A short assistant message of the same kind, with `mark` as the last of its contents."""
        calls = assistant.get("tool_calls")
        if not calls or self.template.arguments == "none":
            return {"role": "assistant", "content": mark}
        marked = [{**call, "function": {"name": call["function"]["name"], "arguments": {}}} for call in calls]
        marked[-1]["function"]["arguments"] = {"a": mark}
        return {"role": "assistant", "content": "", "tool_calls": marked}


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Ids and texts of the tokens that the tokenizer marks as special."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    special = {**dict(named), **added}
    return frozenset(special), tuple(special.values())


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _up_to(text: str, last: str) -> str:
    """`text` up to the end of `last` in it, of which the template may have stripped the ends."""
    begin = text.rfind(last.strip())
    if begin < 0:
        raise ValueError("the chat template leaves out the text of the assistant's last message")
    kept = last.lstrip() if text.startswith(last.lstrip(), begin) else last.strip()
    return text[:begin] + kept


def _overlap(sampled: Sequence[int], tail: Sequence[int], special_ids: frozenset[int]) -> int:
    """How many ids at the head of `tail` the policy has sampled already, counted up to a special token."""
    for k in range(min(len(tail), len(sampled), MAX_OVERLAP), 0, -1):
        if tail[k - 1] in special_ids and list(sampled[-k:]) == list(tail[:k]):
            return k
    return 0
