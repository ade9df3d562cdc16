from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.contract_scene import fill, indices, through_disk
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.types import Group

BATCH = 4


def make_buffer(tmp_path: Path, *flags: str) -> LedgerBuffer:
    rows = ("--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 50)), "--n-samples-per-prompt", "2")
    config = make_config(tmp_path, *rows, "--rollout-batch-size", str(BATCH), "--replay-groups", "1", *flags)
    return LedgerBuffer(config, FilePromptSource(config))


def generate(buffer: LedgerBuffer, version: int) -> None:
    """What the group loop does: prompts until the step has its groups. Group i has rewards 0 and i modulo 5."""
    while len(buffer) < BATCH:
        for group in buffer.reserve(BATCH - len(buffer)):
            fill(group).samples[0].reward = 0.0
            group.samples[1].reward = float(group.group_index % 5)
            for sample in group.samples:
                sample.weight_versions = [version] * sample.response_length
            buffer.admit(group)


def train(buffer: LedgerBuffer, step: int) -> list[tuple[int, int]]:
    """One synchronous step: (group, how often it has trained before)."""
    generate(buffer, step)
    groups: list[Group] = buffer.take(step, BATCH)
    assert buffer.take(step, BATCH) == groups
    buffer.commit(step)
    return [(group.group_index, group.replays) for group in groups]


def test_groups_with_the_widest_spread_train_again_and_are_counted_apart(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    assert train(buffer, 0) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert train(buffer, 1) == [(4, 0), (5, 0), (6, 0), (3, 1)]  # no fresh group is made that would only wait
    assert train(buffer, 2) == [(7, 0), (8, 0), (9, 0), (4, 1)]
    assert train(buffer, 3) == [(10, 0), (11, 0), (12, 0), (9, 1)]
    counts = buffer.counts()
    assert (counts["committed"], counts["replayed"], counts["generated"]) == (13, 3, 0)


def test_a_group_is_replayed_as_often_as_allowed_and_not_beyond_its_age(tmp_path: Path) -> None:
    twice = make_buffer(tmp_path, "--replay-max-uses", "2")
    assert [train(twice, step)[-1] for step in range(6)] == [(3, 0), (3, 1), (4, 1), (9, 1), (9, 2), (14, 1)]
    aged = make_buffer(tmp_path, "--replay-max-age", "1", "--replay-max-uses", "9")
    replayed = [train(aged, step)[-1] for step in range(6)]
    assert all(group >= 3 * (step - 1) for step, (group, _) in enumerate(replayed))


def test_groups_of_equal_rewards_are_not_kept_and_the_pool_is_bounded(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, "--replay-pool-groups", "2")
    for step in range(6):
        train(buffer, step)
        assert len(buffer.payloads) <= 2
        assert 0 not in buffer.payloads and 5 not in buffer.payloads


@pytest.mark.parametrize("stops", [(1, 4, 6), (2, 3, 7)])
def test_a_resumed_run_replays_the_same_groups_in_the_same_steps(tmp_path: Path, stops: tuple[int, ...]) -> None:
    whole = make_buffer(tmp_path)
    expected = [train(whole, step) for step in range(9)]
    buffer, trained = make_buffer(tmp_path), []
    for step in range(9):
        if step in stops:
            generate(buffer, step)
            buffer.take(step, BATCH)
            state = through_disk(buffer.state_dict())
            buffer = make_buffer(tmp_path)
            buffer.load_state_dict(state)
        trained.append(train(buffer, step))
    assert trained == expected
    assert buffer.counts() == whole.counts()


def test_a_resume_without_replay_lets_go_of_the_pool(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    for step in range(3):
        train(buffer, step)
    state = through_disk(buffer.state_dict())
    assert make_resumed(tmp_path, state, "--replay-groups", "1").payloads
    off = make_resumed(tmp_path, state, "--replay-groups", "0")
    assert (len(off.payloads), off.replay.groups()) == (0, [])
    assert [replays for _, replays in train(off, 3)] == [0] * BATCH


def make_resumed(tmp_path: Path, state: dict[str, Any], *flags: str) -> LedgerBuffer:
    buffer = make_buffer(tmp_path, *flags)
    buffer.load_state_dict(state)
    return buffer


def test_one_step_off_chooses_the_same_whichever_of_commit_and_take_comes_first(tmp_path: Path) -> None:
    orders = []
    for take_first in (True, False):
        buffer, taken = make_buffer(tmp_path, "--rollout-ahead", "1"), []
        for step in range(8):
            if not take_first and step > 0:
                buffer.commit(step - 1)
            generate(buffer, step)
            taken.append(indices(buffer.take(step, BATCH)))
            if take_first and step > 0:
                buffer.commit(step - 1)
        orders.append(taken)
    assert orders[0] == orders[1]
    assert any(group < 3 * step for step, groups in enumerate(orders[0]) for group in groups)


def test_it_is_off_by_default_and_bad_flags_are_named(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert "replayed" not in LedgerBuffer(config, FilePromptSource(config)).counts()
    with pytest.raises(ValueError, match=r"--replay-groups must be < --rollout-batch-size \(32\), got 32"):
        make_config(tmp_path, "--replay-groups", "32")
    with pytest.raises(ValueError, match="--replay-groups does not go together with --fully-async"):
        make_config(tmp_path, "--replay-groups", "1", "--fully-async")
    with pytest.raises(ValueError, match="--replay-max-uses must be > 0, got 0"):
        make_config(tmp_path, "--replay-max-uses", "0")
