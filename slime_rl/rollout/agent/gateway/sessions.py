"""What an agent's calls to the gateway become: a tree of turns, and training samples from its leaves.

    call 1: [u1]             ──► prompt ids + sampled          root
    call 2: [u1 a1 u2]       ──► root's ids + new + sampled    child: a linear conversation is one path, one sample
    call 3: [u1 a1 u3]       ──► another child of the root     a branch: a second sample with the same rollout_id
    call 4: [summary u4]     ──► ids of its own                another root, such as a sub-agent or a compacted context

A call continues the turn whose messages, with its answer, are the longest beginning of the call's messages. Tokens that
several samples share are trained in the first of them only, so that nothing counts twice.

Calls of different roles (several agents, or both sides of a game) never continue one another: each role has a tree, a
reward and a rollout_id of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from slime_rl.rollout.agent.parsing import ParsedTurn, assistant_message, read_turn
from slime_rl.rollout.agent.template import Message
from slime_rl.rollout.agent.turns import TurnRenderer
from slime_rl.rollout.client import Generation
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.scope import current_scope
from slime_rl.types import Sample, Status

MAX_CONTINUATIONS = 100  # of one answer that aborts (weight updates, engine failures) break off
ROLE_STRIDE = 1 << 40  # between the rollout_ids of the roles of a session; more than a run has episodes


class GatewayError(Exception):
    """A call that cannot be answered, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False, kw_only=True)
class Turn:
    """One answered call. L = all ids up to the answer's end; `mask` is 1 for every token that the policy sampled."""

    role: str  # "" where the agent names none
    parent: Turn | None
    keys: tuple[str, ...]  # of the messages up to and including the answer
    tools_key: str
    prompt_length: int  # of the root's prompt
    ids: list[int]  # [L]
    mask: list[int]  # [L]
    log_probs: list[float]  # [L]
    versions: list[int]  # [L]
    sampled: list[int]  # the answer's own ids
    answer: Message
    parsed: ParsedTurn
    finish_reason: str  # stop or length
    num_prompt_tokens: int
    children: list[Turn] = field(default_factory=list)


class Session:
    """The calls of one agent run; `sampling_params["max_new_tokens"]` bounds each answer."""

    def __init__(self, key: str, sample: Sample, sampling_params: dict[str, Any]) -> None:
        self.key, self.sample, self.params = key, sample, sampling_params
        self.turns: list[Turn] = []
        self.reward: float | None = None  # of every role that has none of its own
        self.role_rewards: dict[str, float] = {}
        self.finished = asyncio.Event()
        self.num_calls = 0
        self.conversations: dict[str, list[Message]] = {}  # up to each answer that a later call may name by its id
        self.interrupted = False  # by the run: a call was refused for that
        self._renderers: dict[str, TurnRenderer] = {}

    async def complete(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
        role: str = "",
    ) -> Turn:
        """Answer one call and record it.

        Raises:
            GatewayError: the session was finished or interrupted, or no token is left for an answer.
        """
        if self.finished.is_set():
            raise GatewayError(409, "this session is finished")
        self.num_calls += 1
        tools_key = json.dumps(tools, sort_keys=True) if tools else ""
        if tools_key not in self._renderers:
            self._renderers[tools_key] = TurnRenderer(current_runtime().tokenizer, tools)
        renderer = self._renderers[tools_key]
        keys = tuple(message_key(message) for message in messages)
        parent = self._longest_beginning(role, keys, tools_key)
        try:
            if parent is None:
                added = renderer.prompt(messages)
            else:
                added = renderer.following(parent.answer, parent.sampled, messages[len(parent.keys) :])
        except ValueError as error:
            raise GatewayError(400, str(error)) from error
        start = list(parent.ids) if parent else []
        params = dict(self.params)
        params["max_new_tokens"] = min(params["max_new_tokens"], max_tokens or params["max_new_tokens"])
        if stop:
            params["stop"] = [*params.get("stop", []), *stop]
        answer = await self._generate(start + added, params)
        return self._record(role, parent, keys, tools_key, renderer, added, answer, tools or [])

    async def _generate(self, ids: list[int], params: dict[str, Any]) -> Generation:
        """One whole answer, going on after aborts with what is there."""
        tokens: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        for _ in range(MAX_CONTINUATIONS):
            scope = current_scope()
            if scope is not None and scope.interrupted:
                self.interrupted = True
                raise GatewayError(503, "the run has interrupted this session")
            left = params["max_new_tokens"] - len(tokens)
            asked = {**params, "max_new_tokens": left}
            part = await current_runtime().engine.generate(ids + tokens, asked, routing_key=self.key)
            tokens, log_probs, versions = tokens + part.tokens, log_probs + part.log_probs, versions + part.versions
            if part.finish_reason != "abort":
                return dataclasses.replace(part, tokens=tokens, log_probs=log_probs, versions=versions)
            if len(tokens) >= params["max_new_tokens"]:
                return dataclasses.replace(
                    part, tokens=tokens, log_probs=log_probs, versions=versions, finish_reason="length"
                )
        raise GatewayError(503, f"the answer was broken off {MAX_CONTINUATIONS} times")

    def _longest_beginning(self, role: str, keys: tuple[str, ...], tools_key: str) -> Turn | None:
        fitting = [
            turn
            for turn in self.turns
            if (turn.role, turn.tools_key) == (role, tools_key)
            and len(turn.keys) < len(keys)
            and keys[: len(turn.keys)] == turn.keys
        ]
        return max(fitting, key=lambda turn: len(turn.keys), default=None)

    def _record(
        self,
        role: str,
        parent: Turn | None,
        keys: tuple[str, ...],
        tools_key: str,
        renderer: TurnRenderer,
        added: list[int],
        answer: Generation,
        tools: list[dict[str, Any]],
    ) -> Turn:
        body = list(answer.tokens)
        while body and body[-1] in renderer.special_ids:
            body.pop()
        text = current_runtime().tokenizer.decode(body, skip_special_tokens=False)
        parsed = read_turn(current_runtime().parser, text, tools)
        message = assistant_message(parsed, len(self.turns))
        if renderer.template.arguments == "none" and parsed.calls:
            shown: Message = {"role": "assistant", "content": text}
        else:
            shown = message
        n, m = len(added), len(answer.tokens)
        turn = Turn(
            role=role,
            parent=parent,
            keys=(*keys, message_key(message)),
            tools_key=tools_key,
            prompt_length=parent.prompt_length if parent else n,
            ids=(parent.ids if parent else []) + added + answer.tokens,
            mask=(parent.mask if parent else []) + [0] * n + [1] * m,
            log_probs=(parent.log_probs if parent else []) + [0.0] * n + answer.log_probs,
            versions=(parent.versions if parent else []) + [-1] * n + answer.versions,
            sampled=answer.tokens,
            answer=shown,
            parsed=parsed,
            finish_reason=answer.finish_reason,
            num_prompt_tokens=len(parent.ids if parent else []) + n,
        )
        if parent is not None:
            parent.children.append(turn)
        self.turns.append(turn)
        return turn

    def finish(self, reward: float | None = None) -> None:
        """No further calls; `reward` takes the place of an earlier one when it is given."""
        if reward is not None:
            self.reward = float(reward)
        self.finished.set()

    def samples(self) -> list[Sample]:
        """One sample for every leaf, in order of their first calls; those of a role share a rollout_id, and the first
        role's is the session's.

        Raises:
            ValueError: the agent has not made a single call, or gave a reward to a role that it has not played.
        """
        leaves = [turn for turn in self.turns if not turn.children]
        if not leaves:
            raise ValueError("the agent has ended without a call of the gateway; does it use base_url and api_key?")
        if unknown := self.role_rewards.keys() - {turn.role for turn in self.turns}:
            raise ValueError(f"the agent gave a reward to {sorted(unknown)}, which made no call as model policy/ROLE")
        trained: set[int] = set()  # ids of turns whose answer is in an earlier sample
        return [self._sample(leaf, trained, len(leaves)) for leaf in leaves]

    def _sample(self, leaf: Turn, trained: set[int], num_leaves: int) -> Sample:
        path: list[Turn] = []
        node: Turn | None = leaf
        while node is not None:
            path.append(node)
            node = node.parent
        mask = list(leaf.mask)
        for turn in path:
            if id(turn) in trained:
                mask[len(turn.ids) - len(turn.sampled) : len(turn.ids)] = [0] * len(turn.sampled)
            trained.add(id(turn))
        begin = leaf.prompt_length
        roles = list(dict.fromkeys(turn.role for turn in self.turns))
        state = {
            "role": leaf.role,
            "num_turns": len(path),
            "num_tool_calls": sum(len(turn.parsed.calls) for turn in path),
            "num_tool_errors": sum(turn.parsed.malformed for turn in path),
            "num_calls": self.num_calls,
            "num_branches": num_leaves,
            "stop_reason": leaf.finish_reason,
            "parting": None,
            "reward": self.role_rewards.get(leaf.role, self.reward),
        }
        sample = dataclasses.replace(
            self.sample,
            rollout_id=self.sample.rollout_id + ROLE_STRIDE * roles.index(leaf.role),
            metadata={**copy.deepcopy(self.sample.metadata), "agent": state},
            tokens=list(leaf.ids),
            prompt_length=begin,
            response=leaf.parsed.content,
            loss_mask=mask[begin:],
            rollout_log_probs=leaf.log_probs[begin:],
            weight_versions=leaf.versions[begin:],
            reward_info={},
            status=Status.TRUNCATED if leaf.finish_reason == "length" else Status.COMPLETED,
        )
        return sample


def message_key(message: Message) -> str:
    """What makes two messages the same for us: a client may drop reasoning, ids or empty fields of what it got."""
    content = message.get("content") or ""
    if not message.get("tool_calls"):
        return f"{message['role']}\0{message.get('tool_call_id') or ''}\0{content}"
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # compared as text
                arguments = json.loads(arguments or "{}")
        calls.append([call["function"]["name"], arguments])
    return json.dumps([message["role"], content, calls, message.get("tool_call_id")], sort_keys=True)
