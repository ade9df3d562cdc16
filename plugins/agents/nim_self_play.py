"""Self-play: one policy plays both sides of Nim behind the gateway, each side as a role with a reward of its own.

    --generate-function-path gateway --agent-path plugins.agents.nim_self_play:run --rm-type episode

A row may say how many stones there are: metadata {"stones": 12}. The players take 1, 2 or 3 in turn; who takes the last
one wins (1), the other loses (-1), as does who makes a move that is none. The sides are compared with the same side of
the other games from the same row only.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

FIRST, SECOND = "first", "second"
STONES = 12
RULES = "Take 1, 2 or 3 stones; who takes the last one wins. Answer with the number."


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """The rewards of both sides. A side that never moved (the other lost at once) has none."""
    left, side, moved = int(data["metadata"].get("stones", STONES)), FIRST, [FIRST]
    seen: dict[str, list[Any]] = {FIRST: [], SECOND: []}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=2, timeout=600) as client:
        while True:
            rules = "" if seen[side] else f"{RULES} "
            seen[side].append({"role": "user", "content": f"{rules}{left} left."})
            answer = await client.chat.completions.create(model=f"policy/{side}", messages=seen[side])
            text = answer.choices[0].message.content or ""
            seen[side].append({"role": "assistant", "content": text})
            taken = int(text) if re.fullmatch(r"[123]", text.strip()) else 0
            other = SECOND if side == FIRST else FIRST
            if not 0 < taken <= left:
                return {player: -1.0 if player == side else 1.0 for player in moved}
            left -= taken
            if left == 0:
                return {player: 1.0 if player == side else -1.0 for player in moved}
            side = other
            moved = [FIRST, SECOND]
