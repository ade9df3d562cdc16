"""One multi-turn episode of one sample: the policy's turns as sampled, everything else appended and masked.

    Episode ──turn()──► engine ──► parsed turn ──► (tools, environment) ──add(messages)──► … ──end(reason)──► sample

The state lies in `sample.metadata["agent"]` as plain data, so that an episode that an abort interrupts goes on later
where it stopped, in the middle of a turn if need be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.agent.exactness import find_parting
from slime_rl.rollout.agent.parsing import ParsedTurn, as_unicode, assistant_message, read_turn
from slime_rl.rollout.agent.template import Message
from slime_rl.rollout.agent.turns import TurnRenderer
from slime_rl.rollout.generate import append_generation
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status

STATE_KEY = "agent"


class Episode:
    """Holds what `state` says: messages, number of turns, where the current turn begins, why it ended.

    `tools` are the JSON schemas that the prompt was rendered with; `sampling_params["max_new_tokens"]` bounds what the
    response may still grow by, tool and environment text included.
    """

    def __init__(
        self, config: Config, sample: Sample, sampling_params: dict[str, Any], tools: list[dict[str, Any]] | None
    ) -> None:
        self.config, self.sample, self.params = config, sample, sampling_params
        self.tools = tools or []
        self.budget = sample.response_length + int(sampling_params["max_new_tokens"])
        self.runtime = current_runtime()
        self.renderer = TurnRenderer(self.runtime.tokenizer, tools)
        if sample.response_length == 0:
            sample.metadata[STATE_KEY] = _new_state(sample)
        self.state: dict[str, Any] = sample.metadata[STATE_KEY]

    @property
    def messages(self) -> list[Message]:
        return self.state["messages"]

    @property
    def left(self) -> int:
        """Tokens that the response may still have."""
        return self.budget - self.sample.response_length

    async def turn(self) -> ParsedTurn | None:
        """One whole turn of the policy; None when the episode is over for now (interrupted, or out of tokens).

        A turn that nothing has answered yet (the episode was interrupted meanwhile) is given again.
        """
        sample = self.sample
        if self.state.get("is_unanswered"):
            return read_turn(self.runtime.parser, self._turn_text(), self.tools)
        if self.left <= 0:
            self.end("max_tokens", Status.TRUNCATED)
            return None
        params = {**self.params, "max_new_tokens": self.left}
        key = f"{sample.group_index}-{sample.index}"  # the same for all turns: their engine has the prefix cached
        answer = await self.runtime.engine.generate(sample.tokens, params, routing_key=key)
        before = sample.response
        append_generation(sample, answer)
        sample.response = before
        if sample.status is Status.ABORTED:
            return None
        text = self._turn_text()
        parsed = read_turn(self.runtime.parser, text, self.tools)
        if self.renderer.template.arguments == "none" and parsed.calls:
            shown: Message = {"role": "assistant", "content": text}  # the template knows no calls: they stay text
        else:
            shown = assistant_message(parsed, self.state["num_turns"])
        self.messages.append(shown)
        self.state["num_turns"] += 1
        self.state["is_unanswered"] = True
        sample.response = parsed.content
        if sample.status is Status.TRUNCATED:
            self.end("max_tokens", Status.TRUNCATED)
            return None
        return parsed

    def add(self, messages: Sequence[Message]) -> bool:
        """Append what answers the policy's turn; False (and the episode is over) when no token is left for more."""
        sampled = self.sample.response_tokens[self.state["turn_start"] :]
        tokens = self.renderer.following(self.messages[-1], sampled, messages)
        if len(tokens) >= self.left:
            self.end("max_tokens", Status.TRUNCATED)
            return False
        self.sample.append_tokens(tokens, trained=False)
        self.messages.extend(messages)
        self.state["turn_start"], self.state["is_unanswered"] = self.sample.response_length, False
        return True

    def end(self, reason: str, status: Status = Status.COMPLETED) -> Sample:
        """The episode is over for `reason`; compares its ids with the template's rendering of the whole."""
        self.sample.status = status
        self.state["stop_reason"] = reason
        self.state["parting"] = self._parting() if status is Status.COMPLETED else None
        return self.sample

    def cut(self, text: str) -> str:
        """A tool's answer with at most --max-tool-response-len tokens: its beginning and its end."""
        text = as_unicode(text)
        limit = self.config.agent.max_tool_response_len
        if len(text) <= limit:  # a token has at least one character
            return text
        encode, decode = self.renderer.encode, self.runtime.tokenizer.decode
        tokens = encode(text)
        if len(tokens) <= limit:
            return text
        head = limit // 2
        left_out = f"\n[… {len(tokens) - limit} tokens left out …]\n"
        return decode(tokens[:head]) + left_out + decode(tokens[len(tokens) - (limit - head) :])

    def _turn_text(self) -> str:
        tokens = self.sample.response_tokens[self.state["turn_start"] :]
        while tokens and tokens[-1] in self.renderer.special_ids:
            tokens = tokens[:-1]
        return self.runtime.tokenizer.decode(tokens, skip_special_tokens=False)

    def _parting(self) -> str | None:
        """Where our ids part from the whole rendering; None where they do not, or no template was used."""
        if not isinstance(self.sample.prompt, list) and not self.config.data.apply_chat_template:
            return None
        mask = [0] * self.sample.prompt_length + self.sample.loss_mask
        parting = find_parting(self.renderer, self.messages, self.sample.tokens, mask)
        return None if parting is None else str(parting)


def _new_state(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    return {
        "messages": messages,
        "num_turns": 0,
        "is_unanswered": False,  # the policy's last turn
        "turn_start": 0,  # response tokens before the policy's current turn
        "num_tool_calls": 0,
        "num_tool_errors": 0,
        "stop_reason": None,
        "parting": None,
    }
