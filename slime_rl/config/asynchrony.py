from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_rl.config.checks import check_not_negative, check_positive


@dataclass(frozen=True, kw_only=True)
class AsynchronyConfig:
    """Asynchrony: generation beside training, and what becomes of samples that are interrupted, late or too old."""

    fully_async: bool = False
    """Generate without pause while training goes on, at most --max-staleness versions ahead; weights are replaced under
    the requests in flight."""

    max_staleness: int = 1
    """With --fully-async: no token is trained on whose weights are more than this many versions older than the
    trainer's. 0 gives the batches of a synchronous run."""

    wait_for_aging: bool = True
    """With --fully-async: a step waits for running groups that would be over --max-staleness after it. Off, such groups
    are interrupted and --over-age says what becomes of them."""

    over_age: Literal["requeue", "drop", "mask"] = "requeue"
    """Groups with tokens over --max-staleness or --buffer-max-age: generate again (requeue), drop, or train on the
    group without those tokens (mask; generate again where no other is left)."""

    partial_rollout: bool = False
    """Interrupted samples keep their tokens and continue with the rest of their budget; off, they start again."""

    mask_offpolicy_in_partial_rollout: bool = False
    """Leave tokens of a sample that was interrupted out of the loss whose weights are older than its newest ones."""

    sample_deadline_s: float | None = None
    """Longest time for one sample, waiting for an engine left out; then it is aborted, and --min-samples-per-group says
    what its group does."""

    min_samples_per_group: int | None = None
    """A group trains without its late or failed samples when at least this many are finished; when not given, it needs
    them all and waits in the buffer for another attempt."""

    max_group_attempts: int = 4
    """Attempts that a group with late or over-age samples gets before it is dropped and counted."""

    rollout_order: Literal["in_order", "longest_first"] = "in_order"
    """Order in which reserved prompts start: as drawn, or longest first by the response lengths seen for them."""

    def __post_init__(self) -> None:
        check_not_negative(max_staleness=self.max_staleness)
        check_positive(
            sample_deadline_s=self.sample_deadline_s,
            min_samples_per_group=self.min_samples_per_group,
            max_group_attempts=self.max_group_attempts,
        )

    @property
    def is_continuous(self) -> bool:
        """Whether production goes on while the trainer works. With --max-staleness 0 nothing that it made could train,
        so a step is made when it is asked for, as in a synchronous run."""
        return self.fully_async and self.max_staleness > 0
