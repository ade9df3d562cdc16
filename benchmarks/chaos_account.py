"""Was every prompt trained exactly once? What benchmarks/chaos_buffer.py asks of a finished run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from slime_rl.buffer.ledger import Ledger
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config

Trained = list[tuple[int, int, int, int]]  # (step, group_index, epoch, row)


def account(
    config: Config,
    ledger_state: dict[str, Any],
    trained: Trained,
    should_be_dropped: Callable[[int], bool] = lambda group_index: False,
) -> tuple[int, int]:
    """(lost, twice) of a run that has trained all its steps, from its last checkpoint's ledger.

    lost: groups that have neither trained, nor been dropped as they should, nor wait; trainings that are missing, or of
    another prompt than the group's. twice: trainings of a prompt beyond the first within an epoch.
    """
    ledger = Ledger()
    ledger.load_state_dict(ledger_state)
    order = prompt_order(config, ledger.next_group_index)
    counts = Counter((epoch, row) for _, _, epoch, row in trained)
    lost = 0
    for group_index, prompt in enumerate(order):
        state = ledger.state_of(group_index)
        is_there = counts[prompt] > 0 if state == "committed" else state != "dropped" or should_be_dropped(group_index)
        lost += not is_there
    wrong = sum(order[group_index] != (epoch, row) for _, group_index, epoch, row in trained)
    missing = config.train.num_steps * config.train.rollout_batch_size - len(trained)
    return lost + wrong + missing, sum(count - 1 for count in counts.values())


def prompt_order(config: Config, num_prompts: int) -> list[tuple[int, int]]:
    """(epoch, row) of the first prompts of the run's files."""
    drawn = FilePromptSource(config).next_prompts(num_prompts)
    return [(epoch, prompt.source_index) for epoch, prompt in drawn]
