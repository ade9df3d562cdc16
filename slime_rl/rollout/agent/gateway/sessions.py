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
from array import array
from dataclasses import dataclass, field
from typing import Any

from slime_rl.rollout.agent.parsing import ParsedTurn, assistant_message, read_turn
from slime_rl.rollout.agent.template import Message
from slime_rl.rollout.agent.turns import TurnRenderer
from slime_rl.rollout.client import Generation, RequestRefused
from slime_rl.rollout.generate import RequestSeeds, generate_whole
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status

ROLE_STRIDE = 1 << 40  # between the rollout_ids of the roles of a session; more than a run has episodes


class GatewayError(Exception):
    """A call that cannot be answered, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False, kw_only=True)
class Turn:
    """One answered call with its own part only: n appended and m sampled tokens; what comes before is its parents'."""

    index: int  # among the turns of its session
    role: str  # "" where the agent names none
    parent: Turn | None
    keys: tuple[str, ...]  # of the messages since the parent's answer, up to and including its own
    num_messages: int  # of the conversation, its answer included
    tools_key: str
    added: array[int]  # [n]
    sampled: array[int]  # [m]
    log_probs: array[float]  # [m]
    versions: array[int]  # [m]
    num_prompt_tokens: int  # of the conversation up to the answer
    answer: Message
    continues: bool  # the answer begins with the text of the call's last message
    parsed: ParsedTurn
    finish_reason: str  # stop or length
    stopped_by: str | None  # the call's stop text that ended the answer, which does not show it
    children: list[Turn] = field(default_factory=list)

    def path(self) -> list[Turn]:
        """From the root to this turn."""
        path: list[Turn] = []
        node: Turn | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def ids(self) -> list[int]:
        """All ids `[L]` up to the answer's end."""
        return [token for turn in self.path() for part in (turn.added, turn.sampled) for token in part]


@dataclass(frozen=True)
class _Place:
    """Where a call continues the tree."""

    role: str
    parent: Turn | None
    keys: tuple[str, ...]  # of the messages since the parent's answer, but for one that the answer continues
    tools_key: str
    renderer: TurnRenderer
    added: list[int]  # [n]
    begun: str  # text of the assistant that the answer continues

    def prompt(self) -> list[int]:
        return (self.parent.ids if self.parent else []) + self.added


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
        self.calls: set[asyncio.Task[Turn]] = set()  # under way
        self._renderers: dict[str, TurnRenderer] = {}
        self._seeds = RequestSeeds()

    async def complete(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
        role: str = "",
        calls: bool = True,
    ) -> Turn:
        """Answer one call and record it; without `calls`, what the policy writes is text.

        Raises:
            GatewayError: the session was finished or interrupted, or the call cannot be rendered or is too long.
        """
        if self.finished.is_set():
            raise GatewayError(409, "this session is finished")
        self.num_calls += 1
        place = self._place(messages, tools, role)
        params = dict(self.params)
        params["max_new_tokens"] = min(params["max_new_tokens"], max_tokens or params["max_new_tokens"])
        if stop:
            params["stop"] = [*params.get("stop", []), *stop]
        prompt = place.prompt()
        answer = await self._generate(prompt, self._seeds.seeded(params, prompt, role))
        return self._record(place, answer, tools if calls and tools else [], stop or [])

    def count_prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None, role: str = "") -> int:
        """Tokens that a call with these arguments would send."""
        return len(self._place(messages, tools, role).prompt())

    def _place(self, messages: list[Message], tools: list[dict[str, Any]] | None, role: str) -> _Place:
        """Where a call belongs in the tree, and the ids that it adds there."""
        if messages[-1] == {"role": "assistant", "content": ""}:
            messages = messages[:-1]  # nothing to continue
        tools_key = json.dumps(tools, sort_keys=True) if tools else ""
        if tools_key not in self._renderers:
            self._renderers[tools_key] = TurnRenderer(current_runtime().tokenizer, tools)
        renderer = self._renderers[tools_key]
        if not messages:
            raise GatewayError(400, "there is nothing to answer")
        last = messages[-1]
        continues = last["role"] == "assistant"
        if continues and last.get("tool_calls"):
            raise GatewayError(400, "a last message of the assistant that has tool calls cannot be continued")
        keys = tuple(message_key(message) for message in messages)
        parent = self._longest_beginning(role, keys, tools_key)
        new = messages[parent.num_messages if parent else 0 :]
        try:
            if parent is None:
                added = renderer.prompt(messages)
            else:
                added = renderer.following(parent.answer, parent.sampled, new, continue_last=continues)
        except (ValueError, RecursionError) as error:
            raise GatewayError(400, str(error)) from error
        begun = str(last["content"]) if continues else ""
        keys = keys[len(keys) - len(new) :]
        return _Place(role, parent, keys[: len(keys) - continues], tools_key, renderer, added, begun)

    async def _generate(self, ids: list[int], params: dict[str, Any]) -> Generation:
        """One whole answer, going on after aborts with what is there."""
        try:
            answer = await generate_whole(ids, params, routing_key=self.key)
        except RequestRefused as error:
            raise GatewayError(400, str(error)) from error
        if answer.finish_reason == "abort":
            self.interrupted = True
            raise GatewayError(503, "the run has interrupted this session")
        return answer

    def _longest_beginning(self, role: str, keys: tuple[str, ...], tools_key: str) -> Turn | None:
        """The turn whose conversation is the longest true beginning of `keys`; the earliest of several."""
        best: Turn | None = None
        waiting = [
            turn for turn in self.turns if turn.parent is None and (turn.role, turn.tools_key) == (role, tools_key)
        ]
        while waiting:
            turn = waiting.pop()
            begin = turn.num_messages - len(turn.keys)
            if turn.num_messages >= len(keys) or keys[begin : turn.num_messages] != turn.keys:
                continue
            if best is None or (-turn.num_messages, turn.index) < (-best.num_messages, best.index):
                best = turn
            waiting += turn.children
        return best

    def _record(self, place: _Place, answer: Generation, tools: list[dict[str, Any]], stop: list[str]) -> Turn:
        body = list(answer.tokens)
        while body and body[-1] in place.renderer.special_ids:
            body.pop()
        text = current_runtime().tokenizer.decode(body, skip_special_tokens=False)
        text, stopped_by = _before_stop(text, stop if answer.finish_reason == "stop" else [])
        parsed = read_turn(current_runtime().parser, text, tools)
        index = self.turns[-1].index + 1 if self.turns else 0
        message = assistant_message(parsed, index)
        shown: Message = message
        if place.renderer.template.arguments == "none" and parsed.calls:
            shown = {"role": "assistant", "content": text}
        if place.begun:  # what a client makes of it is one message
            message = {**message, "content": place.begun + message["content"]}
            shown = {**shown, "content": place.begun + shown["content"]}
        parent = place.parent
        turn = Turn(
            index=index,
            role=place.role,
            parent=parent,
            keys=(*place.keys, message_key(message)),
            num_messages=(parent.num_messages if parent else 0) + len(place.keys) + 1,
            tools_key=place.tools_key,
            added=array("i", place.added),
            sampled=array("i", answer.tokens),
            log_probs=array("d", answer.log_probs),
            versions=array("q", answer.versions),
            num_prompt_tokens=len(place.added) + (parent.num_prompt_tokens + len(parent.sampled) if parent else 0),
            answer=shown,
            continues=bool(place.begun),
            parsed=parsed,
            stopped_by=stopped_by,
            finish_reason=answer.finish_reason,
        )
        if parent is not None:
            parent.children.append(turn)
        self.turns.append(turn)
        return turn

    def forget(self, turn: Turn) -> None:
        """Take back a turn whose answer nobody has got; one that was continued meanwhile stays."""
        if turn in self.turns and not turn.children:
            self.turns.remove(turn)
            if turn.parent is not None:
                turn.parent.children.remove(turn)

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
        path = leaf.path()
        mask: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        for turn in path:
            n, m = len(turn.added), len(turn.sampled)
            mask += [0] * n + [int(id(turn) not in trained)] * m
            log_probs += [0.0] * n + turn.log_probs.tolist()
            versions += [-1] * n + turn.versions.tolist()
            trained.add(id(turn))
        begin = len(path[0].added)
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
            tokens=leaf.ids,
            prompt_length=begin,
            response=leaf.parsed.content,
            loss_mask=mask[begin:],
            rollout_log_probs=log_probs[begin:],
            weight_versions=versions[begin:],
            reward_info={},
            status=Status.TRUNCATED if leaf.finish_reason == "length" else Status.COMPLETED,
        )
        return sample


def _before_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """`text` up to the first of the stop texts, and that one: agents get what the API would give them."""
    found = [(begin, one) for one in stop if (begin := text.find(one)) >= 0]
    begin, one = min(found, default=(len(text), None), key=lambda pair: pair[0])
    return text[:begin], one


def message_key(message: Message) -> str:
    """What makes two messages the same for us: a client may drop reasoning, ids or empty fields of what it got."""
    content = message.get("content") or ""
    if not message.get("tool_calls"):
        return f"{message['role']}\0{message.get('tool_call_id') or ''}\0{content}"
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # compared as text
                arguments = json.loads(arguments or "{}")
        calls.append([call["function"]["name"], arguments])
    return json.dumps([message["role"], content, calls, message.get("tool_call_id")], sort_keys=True)
