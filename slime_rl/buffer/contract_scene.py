"""What a data buffer is checked with: seven prompts, generated groups, and a state that goes through a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_rl.data.state_files import load_state, save_state
from slime_rl.protocols import DataBuffer
from slime_rl.types import Group, Prompt, Status

NUM_PROMPTS, GROUP_SIZE = 7, 2
MakeBuffer = Callable[[], DataBuffer]


class CountingSource:
    """A PromptSource over seven numbered prompts, in order, epoch after epoch. It gives the same objects each time."""

    def __init__(self) -> None:
        self.position = 0
        rows = range(NUM_PROMPTS)
        self.prompts = [Prompt(source_index=i, prompt=f"prompt {i}", label=[i], metadata={}) for i in rows]

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        numbers = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        return [(number // NUM_PROMPTS, self.get(number % NUM_PROMPTS)) for number in numbers]

    def get(self, source_index: int) -> Prompt:
        return self.prompts[source_index]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __len__(self) -> int:
        return NUM_PROMPTS


def fill(group: Group, num_tokens: int = 3) -> Group:
    """Generate and reward a group, the same for the same group."""
    for sample in group.samples:
        if not sample.tokens:
            sample.set_prompt_tokens([1, 2])
        n = num_tokens + sample.index % 3
        sample.append_tokens(list(range(n)), log_probs=[-0.1 * (i + 1) for i in range(n)], versions=[4] * n)
        sample.reward, sample.response, sample.status = sample.index / 10, f"text {sample.index}", Status.COMPLETED
    return group


def dress(group: Group) -> Group:
    """What else a group may carry: nested metadata, details of the reward, masked tokens, samples left out."""
    for sample in group.samples:
        sample.metadata["tool"] = {"calls": [sample.index, None, 0.5], "name": "añ\u4f60"}
        sample.reward_info = {"format": sample.index / 2, "why": "so"}
        sample.append_tokens([7], trained=False)
    group.left_out = {"too_long": 1}
    group.attempts = 2
    return group


def indices(groups: list[Group]) -> list[int]:
    return [group.group_index for group in groups]


def expect(condition: bool, rule: str, got: Any) -> None:
    if not condition:
        raise ContractError(f"{rule}; got {got!r}")


def refuses(action: Callable[[], Any], what: str) -> None:
    try:
        result = action()
    except ValueError:
        return
    raise ContractError(f"must raise ValueError: {what}; returned {result!r}")


class ContractError(Exception):
    """The buffer does not do what the contract says."""


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    """A saved state as a resumed run gets it."""
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder) / "buffer.json", state)
        return load_state(Path(folder) / "buffer.json")
