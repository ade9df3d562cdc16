"""Multi-turn generation with tools: `--generate-function-path agent_loop`.

policy's turn ──► tool calls? ──none──► done (stop_reason "stop")
     ▲                │ all at once, each with its deadline
     └── answers as tool messages, masked ◄──┘
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.agent.episode import Episode
from slime_rl.rollout.agent.parsing import ParsedTurn, ToolCall, call_id
from slime_rl.rollout.agent.template import Message
from slime_rl.rollout.agent.tools import ToolAnswer, row_tools, tool_set
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status

UNREADABLE = "Error: the tool call could not be read; write it in the format you were shown, for a tool that exists"


async def agent_loop(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the policy talk and call tools until it answers without a call, or a limit ends the episode.

    The sample's `response` is the text of the last turn; the conversation, counts and the stop reason ("stop",
    "max_turns", "max_tokens") are in `metadata["agent"]`. Tool answers have mask 0.
    """
    episode = Episode(config, sample, sampling_params, row_tools(config, sample.metadata))
    while (parsed := await episode.turn()) is not None:
        if not parsed.calls and not parsed.malformed:
            return episode.end("stop")
        if episode.state["num_turns"] >= config.agent.max_turns:
            return episode.end("max_turns", Status.TRUNCATED)
        answers = await answer_calls(config, episode, parsed)
        if not episode.add(answers):
            return sample
    return sample


async def answer_calls(config: Config, episode: Episode, parsed: ParsedTurn) -> list[Message]:
    """One tool message for each call of a turn, all run at once."""
    if parsed.malformed:
        episode.state["num_tool_errors"] += 1
        return [{"role": "tool", "name": "error", "content": UNREADABLE}]
    known = tool_set(config.agent)
    allowed = [schema["function"]["name"] for schema in episode.tools]

    async def run(call: ToolCall) -> ToolAnswer:
        with current_runtime().trace.span("tools", call.name):
            return await known.call(call, allowed)

    answers = await asyncio.gather(*(run(call) for call in parsed.calls))
    episode.state["num_tool_calls"] += len(answers)
    episode.state["num_tool_errors"] += sum(answer.failed for answer in answers)
    turn = episode.state["num_turns"] - 1
    return [
        {"role": "tool", "tool_call_id": call_id(turn, i), "name": call.name, "content": episode.cut(answer.text)}
        for i, (call, answer) in enumerate(zip(parsed.calls, answers, strict=True))
    ]
