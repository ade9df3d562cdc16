"""A policy made of texts: an engine that answers each request with the next one, and a parser of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from factories import make_config
from random_chats import tokenizer_for, trained_bpe
from scripted_engine import answer, scripted_engine

from slime_rl.config import Config
from slime_rl.rollout.agent.gateway.server import Gateway
from slime_rl.rollout.agent.parsing import ParsedTurn, ToolCall
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.rewards.fence import ProcessFence, use_fence
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime

TOKENIZER = tokenizer_for("qwen2_5", trained_bpe())
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class HermesLikeParser:
    """`<tool_call>` blocks with JSON, as Qwen writes them. Stands in for SGLang's, which unit tests do not load."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        if not tools:
            return ParsedTurn(content=text)
        calls = []
        for block in _CALL.findall(text):
            try:
                call = json.loads(block)
            except (ValueError, RecursionError):
                continue
            calls.append(ToolCall(name=call["name"], arguments=json.dumps(call["arguments"])))
        content = text.partition("<tool_call>")[0].strip() if calls else text
        return ParsedTurn(content=content, calls=calls, malformed="<tool_call>" in text and not calls)


def calling(*calls: tuple[str, dict[str, Any]]) -> str:
    """A turn that calls tools, in the template's own spelling."""
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(args)}}}\n</tool_call>' for name, args in calls
    ]
    return "\n".join(blocks) + "<|im_end|>"


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@asynccontextmanager
async def policy(tmp_path: Path, turns: Sequence[Any], *flags: str, workers: int = 1) -> Any:
    """Yields (config, requests received). A turn is a text, or an answer as `scripted_engine.answer` makes."""
    script: Iterator[Any] = iter(turns)

    def reply(body: dict[str, Any]) -> Any:
        turn = next(script)
        return answer(tokens_of(turn), turn) if isinstance(turn, str) else turn

    config: Config = make_config(tmp_path, *flags)
    async with scripted_engine(reply) as (url, received), EngineClient(url, max_in_flight=8, timeout_s=60) as client:
        gateway = Gateway()
        await gateway.start()
        runtime = RolloutRuntime(client=client, tokenizer=TOKENIZER, make_parser=HermesLikeParser, gateway=gateway)
        with ProcessFence(workers, timeout_s=60.0) as fence, use_fence(fence), use_runtime(runtime):
            try:
                yield config, received
            finally:
                await gateway.close()
