"""What did not train in a step, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from slime_rl.types import Group


class DropMetrics:
    """From the buffer's totals to what was dropped since the last step."""

    def __init__(self) -> None:
        self._before: Mapping[str, int] = {}

    def start_from(self, counts: Mapping[str, int]) -> None:
        """The buffer's counts before the next step, after a resume."""
        self._before = counts

    def metrics(self, counts: Mapping[str, int], groups: Sequence[Group]) -> dict[str, float]:
        """rollout/groups_dropped, rollout/samples_left_out and rollout/replayed_groups of a step that has `groups`."""
        dropped = {name.removeprefix("dropped/"): n for name, n in counts.items() if name.startswith("dropped/")}
        new = {reason: n - self._before.get(f"dropped/{reason}", 0) for reason, n in dropped.items()}
        self._before = counts
        left_out = sum((Counter(group.left_out) for group in groups), Counter())
        replayed = sum(group.replays > 0 for group in groups)
        metrics = {f"rollout/groups_dropped/{reason}": float(n) for reason, n in new.items() if n}
        metrics |= {f"rollout/samples_left_out/{reason}": float(n) for reason, n in left_out.items()}
        return metrics | ({"rollout/replayed_groups": float(replayed)} if replayed else {})
