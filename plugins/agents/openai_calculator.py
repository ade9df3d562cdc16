"""An agent written on the official `openai` client, without a line about training: it runs as it is behind the gateway.

    --generate-function-path gateway --agent-path plugins.agents.openai_calculator:run --rm-type episode

It asks the model, runs the calculator when the model calls it, and goes on until there is an answer. The reward is
whether the answer is the label.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from slime_rl.rollout.agent.builtin_tools import calculator

MAX_CALLS = 6
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 when the agent's last answer is `data["label"]`, else 0."""
    prompt = data["prompt"]
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=2, timeout=600) as client:
        for _ in range(MAX_CALLS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == str(data["label"]))
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _answer(call)})
    return 0.0


def _answer(call: Any) -> str:
    try:
        return calculator(**json.loads(call.function.arguments))
    except (ValueError, TypeError, SyntaxError, ArithmeticError) as error:
        return f"Error: {error}"
