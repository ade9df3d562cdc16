"""What runs of the reasoning-gym package inside the fence; never imported by the run itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

# Imported here although it is only needed below: the fence's time limit for imports is longer than that of a call.
import reasoning_gym  # noqa: F401

from plugins.data.reasoning_gym_tasks import open_task, parse_task_spec


def score(task: str, entry: dict[str, Any], answer: str) -> float:
    """The score of `answer` by the verifier of `task`, a spec as text."""
    return float(_dataset(task).score_answer(answer, entry))


@lru_cache(maxsize=8)
def _dataset(task: str) -> Any:
    """Some verifiers read the task's options, so it is opened as for the prompts, once per process."""
    return open_task(parse_task_spec(task, "task"), "task")
