"""How long responses to a prompt were, to start the longest first: the last to finish then started early.

Longest-processing-time-first scheduling (Graham, 1969). Nothing is reordered beyond the groups reserved together.
"""

from __future__ import annotations

from typing import Any

from slime_rl.types import Group, Status

DECAY = 0.5  # weight of the newest group of a prompt; policies change, so history fades


class LengthHistory:
    """Mean of the longest response per prompt, fading. A prompt without history counts as the mean of all."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}  # source_index -> tokens
        self._mean = 0.0

    def record(self, source_index: int, longest: int) -> None:
        """A group of this prompt has ended, `longest` being the tokens of its longest response, late ones included."""
        before = self._longest.get(source_index)
        self._longest[source_index] = longest if before is None else before + DECAY * (longest - before)
        self._mean += (longest - self._mean) / min(len(self._longest), 1000)

    def record_begun(self, source_index: int, longest: int) -> None:
        """A group of this prompt was interrupted when its longest response had so many tokens: it takes more."""
        if longest > self._longest.get(source_index, self._mean):
            self._longest[source_index] = longest

    def predict(self, group: Group) -> float:
        """Expected tokens of the group's longest response that are still to come.

        One that has outgrown what is known of its prompt is expected to take as long again: lengths have a long tail.
        """
        longest = self._longest.get(group.source_index, self._mean)
        begun = [s.response_length for s in group.samples if not s.status.is_finished and s.status is not Status.FAILED]
        return max((max(longest - has, has) for has in begun), default=0.0)

    def longest_first(self, groups: list[Group]) -> list[Group]:
        """Ties stay in order."""
        return sorted(groups, key=lambda group: -self.predict(group))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"rows": list(self._longest), "tokens": list(self._longest.values()), "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when `state` is not what `state_dict` gave."""
        try:
            longest, mean = dict(zip(state["rows"], state["tokens"], strict=True)), float(state["mean"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"--load: the lengths of the checkpoint (lengths.json) are damaged: {what}") from error
        self._longest, self._mean = longest, mean
