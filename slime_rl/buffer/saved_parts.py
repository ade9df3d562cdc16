"""Reading a saved buffer part by part: one that is damaged is named, and what fits together is checked.

The state is a dictionary of parts (see `LedgerBuffer.state_dict`). Files may be cut short or edited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from slime_rl.buffer.ledger import Ledger, State
from slime_rl.buffer.packed import PackedGroups


@contextmanager
def part_of_state(name: str) -> Iterator[None]:
    """Around the reading of one part: what goes wrong becomes a ValueError that names it."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, ValueError) and str(error).startswith("--"):
            raise  # says itself what is wrong with which flag
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        what = f"it has no {error}" if isinstance(error, KeyError) else text
        raise ValueError(
            f"--load: the buffer's part of the checkpoint (buffer.json) is damaged at {name!r}: {what}; load an older "
            "checkpoint"
        ) from error


def read_records(state: dict[str, Any], ledger: Ledger) -> dict[int, list[int]]:
    """What live groups are made from again, by group_index."""
    table = state["records"]
    if not isinstance(table, Tensor) or table.ndim != 2 or table.shape[1] != 4 or table.is_floating_point():
        shape = f"{table.dtype} {tuple(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"must be whole numbers [groups, 4], got {shape}")
    records = {group_index: record for group_index, *record in table.tolist()}
    if odd := sorted(records.keys() ^ ledger.live()):
        raise ValueError(f"must have one entry for each group that is not done, which is not so for {odd[:5]}")
    return records


def read_promised(state: dict[str, Any], ledger: Ledger) -> dict[int, list[int]]:
    """step -> groups that it had taken."""
    promised = {int(step): list(groups) for step, groups in state["promised"]}
    for step, groups in promised.items():
        if odd := [group for group in groups if ledger.state_of(group) is not State.GENERATED]:
            raise ValueError(f"step {step} had taken groups that are not generated: {odd[:5]}")
    return promised


def read_payloads(state: dict[str, Any], ledger: Ledger, kept: Sequence[int]) -> list[PackedGroups]:
    """The blocks of packed groups. `kept` are groups that have trained and may train again."""
    blocks = [PackedGroups.from_flat(flat) for flat in state["payloads"]]
    indices: list[int] = []
    for block in blocks:
        indices += block.groups["group_index"].tolist()
        held = int(block.groups["num_samples"].sum())
        if held != len(block.samples):
            raise ValueError(f"groups of {held} samples come with {len(block.samples)}")
    have = set(indices)
    if len(have) < len(indices):
        raise ValueError("a group is there twice")
    if missing := sorted({*ledger.in_state(State.GENERATED), *kept} - have):
        raise ValueError(f"the tokens of the groups {missing[:5]} are missing")
    if foreign := sorted(have - set(ledger.live()) - set(kept)):
        raise ValueError(f"groups that are done have tokens: {foreign[:5]}")
    return blocks


def read_numbering(state: dict[str, Any], ledger: Ledger, per_group: int) -> int:
    """The sample index that counting begins from with `per_group` samples a group; see `LedgerBuffer`."""
    samples = dict(state["samples"])
    saved, first = samples["per_group"], samples["first_index"]
    if type(saved) is not int or type(first) is not int or saved < 1 or first < 0:
        raise ValueError(f"samples are numbered from 0 in groups of 1 or more, got {samples}")
    return first if saved == per_group else first + ledger.next_group_index * saved
