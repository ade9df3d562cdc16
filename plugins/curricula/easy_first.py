"""Begin with the easy prompts and let harder ones in from epoch to epoch.

    --curriculum-path plugins.curricula.easy_first:easy_first

A row says how hard it is in `metadata["difficulty"]`, any number. Epoch 0 has the easiest third, epoch 1 two thirds,
later epochs all rows; within an epoch the order stays as it is. A curriculum is a plain function of its arguments:
nothing is remembered, so that a resumed run gets the same rows. One with a setting is made by another function, as
`growing_over` shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from slime_rl.config import Config
from slime_rl.protocols import Curriculum
from slime_rl.types import Prompt

KEY = "difficulty"


def growing_over(num_epochs: int) -> Curriculum:
    """A curriculum whose share of the rows, easiest first, grows evenly until all are in after `num_epochs`.

    Raises:
        ValueError: `num_epochs` is not positive; while training, a row without its difficulty.
    """
    if num_epochs < 1:
        raise ValueError(f"growing_over takes a number of epochs > 0, got {num_epochs}")

    def choose(config: Config, epoch: int, rows: list[int], prompt_of: Callable[[int], Prompt]) -> list[int]:
        if epoch + 1 >= num_epochs:
            return rows
        hardness = {row: difficulty_of(prompt_of(row)) for row in set(rows)}
        count = math.ceil(len(rows) * (epoch + 1) / num_epochs)
        easiest = sorted(range(len(rows)), key=lambda i: (hardness[rows[i]], i))[:count]
        return [rows[i] for i in sorted(easiest)]

    return choose


def difficulty_of(prompt: Prompt) -> float:
    value = prompt.metadata.get(KEY)
    if not isinstance(value, (int, float)):
        raise ValueError(f"row {prompt.source_index}: metadata[{KEY!r}] must be a number, got {value!r}")
    return float(value)


easy_first = growing_over(3)
