"""SGLang's own parsers of tool calls and reasoning, for turns that are parsed outside of an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from slime_rl.engine.device import engine_device
from slime_rl.rollout.agent.parsing import ParsedTurn, ToolCall


class SglangParser:
    """A `TurnParser` by the names that SGLang gives its formats. Imports SGLang when it is made.

    Raises:
        ValueError: a name that the installed SGLang does not know; lists those it knows.
    """

    def __init__(self, tool_call_parser: str, reasoning_parser: str | None, device: str = "auto") -> None:
        self.parsers = _import_parsers(engine_device(device) == "cpu")  # type: ignore[arg-type]
        _check("--tool-call-parser", tool_call_parser, self.parsers["function"].ToolCallParserEnum)
        if reasoning_parser is not None:
            _check("--reasoning-parser", reasoning_parser, self.parsers["reasoning"].DetectorMap)
        self.tool_call_parser, self.reasoning_parser = tool_call_parser, reasoning_parser

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        """See `TurnParser`. Parsers keep state, so that each turn gets new ones."""
        reasoning = ""
        if self.reasoning_parser is not None:
            reader = self.parsers["reasoning"](self.reasoning_parser, stream_reasoning=False)
            thought, rest = reader.parse_non_stream(text)
            reasoning, text = thought or "", rest or ""
        if not tools:
            return ParsedTurn(content=text, reasoning=reasoning)
        declared = [self.parsers["tool"].model_validate(schema) for schema in tools]
        reader = self.parsers["function"](declared, self.tool_call_parser)
        try:
            if not reader.has_tool_call(text):
                return ParsedTurn(content=text, reasoning=reasoning)
            content, found = reader.parse_non_stream(text)
            calls = [ToolCall(name=call.name or "", arguments=call.parameters) for call in found]
        except Exception:  # the formats' readers raise errors of every kind at what a policy can write
            return ParsedTurn(content=text, reasoning=reasoning, malformed=True)
        return ParsedTurn(content=content if calls else text, reasoning=reasoning, calls=calls, malformed=not calls)


@lru_cache(maxsize=1)
def _import_parsers(on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        from slime_rl.engine.cpu import stand_ins

        stand_ins.install()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    # A malformed call is normal while a policy learns; the agent loop counts it and answers it.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    return {"tool": Tool, "function": FunctionCallParser, "reasoning": ReasoningParser}


def _check(flag: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        names = ", ".join(sorted(known))
        raise ValueError(f"{flag} must be a parser of the installed SGLang, one of {names}; got {name!r}")
