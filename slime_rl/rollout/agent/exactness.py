"""Where the ids of a conversation part from the chat template's rendering of the whole of it, and why.

Multi-turn generation appends: what the policy sampled stays, new messages come behind. The template's rendering of the
whole conversation gives the same ids unless one of these holds, and then the ids that the policy saw are to train on:

`history`  the template writes earlier turns anew (Qwen3 and DeepSeek-R1 leave out earlier reasoning, many strip spaces)
`sampled`  the policy wrote a turn in another way than the template would: other tokens for the same text, other spaces
           or key order in a tool call, another or no end token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slime_rl.rollout.agent.template import Message
from slime_rl.rollout.agent.turns import TurnRenderer

EXCERPT_TOKENS = 12


class Cause(StrEnum):
    """Why a conversation's ids differ from the template's."""

    HISTORY = "history"  # the template changes what it wrote before
    SAMPLED = "sampled"  # a sampled turn is not what the template writes for its message
    RENDERED = "rendered"  # text that we rendered differs: our mistake, or a template that no rule here fits


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first place where ids differ."""

    position: int  # of the first different id
    cause: Cause
    ours: str  # a few tokens of text from there
    template: str

    def __str__(self) -> str:
        return f"token {self.position} ({self.cause}): ours {self.ours!r}, the template's {self.template!r}"


def find_parting(
    renderer: TurnRenderer, messages: Sequence[Message], ids: Sequence[int], sampled: Sequence[int]
) -> Parting | None:
    """None when `ids [L]` are the template's rendering of `messages`, else where and why they part.

    `sampled [L]` is 1 for the policy's tokens. `messages` end with the assistant's last turn; what a template writes
    behind its end token (such as a newline) is no difference.
    """
    expected = renderer.whole(messages, add_generation_prompt=False)
    position = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), None)
    if position is None:
        rest = expected[len(ids) :]
        if len(ids) <= len(expected) and not renderer.tokenizer.decode(rest).strip():
            return None
        position = min(len(ids), len(expected))
        if len(ids) == len(expected) + 1 and ids[-1] in renderer.special_ids:
            return None  # an end token that this template writes with the next message only (GLM)
    decode = renderer.tokenizer.decode
    return Parting(
        position=position,
        cause=_cause(renderer, messages, position, sampled),
        ours=decode(list(ids[position : position + EXCERPT_TOKENS])),
        template=decode(expected[position : position + EXCERPT_TOKENS]),
    )


def _cause(renderer: TurnRenderer, messages: Sequence[Message], position: int, sampled: Sequence[int]) -> Cause:
    """`history` when the template itself, asked after each turn, does not keep what it wrote before."""
    if rewrites_history(renderer, messages):
        return Cause.HISTORY
    near = sampled[position : position + 2]  # a turn's first token may have merged with the one before it
    return Cause.SAMPLED if position >= len(sampled) or any(near) else Cause.RENDERED


def rewrites_history(renderer: TurnRenderer, messages: Sequence[Message]) -> bool:
    """Whether the template's text for a conversation is not the beginning of its text for a longer one."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text = renderer.template.text
    grown = text(messages, False)
    for turn in turns[:-1]:
        kept = text(messages[: turn + 1], False).rstrip()
        if not grown.startswith(kept):
            return True
    return any(not grown.startswith(text(messages[:turn], True).rstrip()) for turn in turns if turn > 0)
