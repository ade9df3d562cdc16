"""A prompt source of the user's own, guarded: what it raises comes with the flag, and what it returns is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from slime_rl.buffer.sources.prompts import check_prompt
from slime_rl.protocols import PromptSource
from slime_rl.registry import own_code
from slime_rl.types import Prompt


class OwnSource:
    """A PromptSource around another one. Optional methods (limit_lengths, skipped_rows) are there if that has them."""

    def __init__(self, source: PromptSource, flag: str) -> None:
        self._source, self._flag = source, flag
        for name in ("limit_lengths", "skipped_rows"):  # isinstance with a protocol does not ask __getattr__
            if hasattr(source, name):
                setattr(self, name, self._guarded(name))

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """When a prompt is refused, none is drawn: a resume with a mended source begins with those that were good."""
        before = copy.deepcopy(self.state_dict())
        try:
            return self._drawn(num_prompts)
        except ValueError:
            self.load_state_dict(before)
            raise

    def _drawn(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        with own_code(self._flag, f", asked for {num_prompts} prompts"):
            drawn: Any = self._source.next_prompts(num_prompts)
        if not isinstance(drawn, list) or len(drawn) != num_prompts:
            got = f"{len(drawn)} prompts" if isinstance(drawn, list) else f"a {type(drawn).__name__}"
            raise ValueError(f"{self._flag} gave {got} where {num_prompts} were asked for")
        for entry in drawn:
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Prompt)):
                raise ValueError(f"{self._flag} must give pairs of epoch and Prompt, got {entry!r:.80}")
            epoch, prompt = entry
            for name, number in (("epoch", epoch), ("source_index", prompt.source_index)):
                if type(number) is not int or not 0 <= number < 1 << 63:
                    rule = f"must give {name} as a whole number >= 0 and < 2**63"
                    raise ValueError(f"{self._flag} {rule}, got {number!r:.60}")
            self._check(prompt)
        return drawn

    def get(self, source_index: int) -> Prompt:
        """Raises ValueError unless it is the prompt of that row."""
        with own_code(self._flag, f", asked for row {source_index}"):
            prompt: Any = self._source.get(source_index)
        if not isinstance(prompt, Prompt):
            raise ValueError(f"{self._flag}: get({source_index}) must return a Prompt, got {prompt!r:.80}")
        if prompt.source_index != source_index:
            raise ValueError(f"{self._flag}: get({source_index}) returned the prompt of row {prompt.source_index}")
        self._check(prompt)
        return prompt

    def state_dict(self) -> dict[str, Any]:
        with own_code(self._flag, ", asked for its state"):
            return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with own_code(self._flag, ", given a saved state"):
            self._source.load_state_dict(state)

    def __len__(self) -> int:
        with own_code(self._flag, ", asked for its length"):
            return len(self._source)

    def _check(self, prompt: Prompt) -> None:
        """Raises ValueError where generation would find no prompt in it."""
        what = f"{self._flag}: the prompt of row {prompt.source_index!r:.40}"
        check_prompt(prompt.prompt, what)
        metadata: Any = prompt.metadata
        if not isinstance(metadata, dict):
            raise ValueError(f"{what} must have a dictionary as its metadata, got {metadata!r:.80}")

    def _guarded(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with own_code(self._flag, f", in {name}"):
                answer: Any = getattr(self._source, name)(*arguments)
            if name == "skipped_rows" and not _is_count(answer):
                raise ValueError(f"{self._flag}: skipped_rows must return whole numbers by reason, got {answer!r:.80}")
            return answer

        return call


def _is_count(answer: Any) -> bool:
    return isinstance(answer, dict) and all(type(key) is str and type(n) is int for key, n in answer.items())
