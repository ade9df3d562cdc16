from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.contract_scene import fill, indices, through_disk
from slime_rl.buffer.filters import Ranking
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.types import Group, Prompt


def make_buffer(tmp_path: Path, *flags: str) -> LedgerBuffer:
    config = make_config(tmp_path, "--n-samples-per-prompt", "2", *flags)
    return LedgerBuffer(config, FilePromptSource(config))


def saved(buffer: LedgerBuffer) -> dict[str, Any]:
    return through_disk(buffer.state_dict())


def resume(tmp_path: Path, buffer: LedgerBuffer, *flags: str) -> LedgerBuffer:
    again = make_buffer(tmp_path, *flags)
    again.load_state_dict(saved(buffer))
    return again


def train(buffer: LedgerBuffer, step: int, num_groups: int) -> list[tuple[int, int, int]]:
    """One synchronous step: (group, epoch, row) of what trained."""
    missing = max(0, num_groups - len(buffer))
    for group in buffer.reserve(missing):
        buffer.admit(fill(group))
    groups = buffer.take(step, num_groups)
    buffer.commit(step)
    return [(g.group_index, g.epoch, g.source_index) for g in groups]


def test_samples_are_numbered_by_group_and_do_not_share_metadata(tmp_path: Path) -> None:
    groups = make_buffer(tmp_path).reserve(2)
    assert [s.index for g in groups for s in g.samples] == [0, 1, 2, 3]
    assert [s.rollout_id for s in groups[1].samples] == [2, 3]
    groups[0].samples[0].metadata["seen"] = True
    assert groups[0].samples[1].metadata == {}


def test_a_label_is_each_sample_s_own(tmp_path: Path) -> None:
    data = tmp_path / "list.json"
    data.write_text('[{"prompt": "p", "label": ["a", "b"]}]')
    buffer = make_buffer(tmp_path, "--prompt-data", str(data))
    (group,) = buffer.reserve(1)
    group.samples[0].label.clear()
    (later,) = buffer.reserve(1)  # the same row in the next epoch
    assert [group.samples[1].label, later.samples[0].label] == [["a", "b"]] * 2


def test_eight_groups_from_three_prompts(tmp_path: Path) -> None:
    assert [g.epoch for g in make_buffer(tmp_path).reserve(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("stops", [(7, 12, 17), (1, 2, 3), (3, 6, 9)])
def test_a_run_that_is_killed_and_resumed_trains_the_same_prompts_in_each_step(
    tmp_path: Path, stops: tuple[int, ...]
) -> None:
    flags = ("--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 9)))
    whole = make_buffer(tmp_path, *flags)
    expected = [train(whole, step, 4) for step in range(20)]
    buffer, steps = make_buffer(tmp_path, *flags), []
    for step in range(20):
        steps.append(train(buffer, step, 4))
        if step + 1 in stops:
            kept = saved(buffer)
            buffer.reserve(3)  # the next step had begun when the run was killed
            buffer = make_buffer(tmp_path, *flags)
            buffer.load_state_dict(kept)
    assert steps == expected


def test_the_step_that_ran_ahead_trains_the_same_groups_after_a_resume(tmp_path: Path) -> None:
    flags = ("--buffer-filter-path", "freshest_first")
    buffer = make_buffer(tmp_path, *flags)
    for group in buffer.reserve(6):
        buffer.admit(fill(group))
    buffer.take(0, 2)
    ahead = buffer.take(1, 2)
    buffer.commit(0)
    resumed = resume(tmp_path, buffer, *flags)
    for group in resumed.reserve(2):
        fresh = fill(group)
        for sample in fresh.samples:
            sample.weight_versions = [9] * sample.response_length
        resumed.admit(fresh)
    assert resumed.take(1, 2) == ahead
    assert not set(indices(resumed.take(2, 2))) & set(indices(ahead))


def test_waiting_and_partial_groups_survive_a_resume(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    groups = buffer.reserve(3)
    for sample in groups[1].samples:
        sample.set_prompt_tokens([5])
        sample.append_tokens([6, 7], log_probs=[-0.3, -0.7], versions=[1, 1])
    groups[1].attempts = 2
    for group in groups:
        buffer.requeue(group)
    again = resume(tmp_path, buffer).reserve(4)
    assert again[:3] == groups
    assert again[1].attempts == 2
    assert again[3].group_index == 3


def test_what_a_reserved_partial_group_gained_is_not_saved_half_done(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    (group,) = buffer.reserve(1)
    fill(group, num_tokens=1)
    buffer.requeue(group)
    (going_on,) = buffer.reserve(1)
    going_on.samples[0].tokens.append(99)  # in the middle of a change
    (again,) = resume(tmp_path, buffer).reserve(1)
    assert again == group


def test_take_without_enough_groups_says_how_many_there_are(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    buffer.admit(fill(buffer.reserve(1)[0]))
    with pytest.raises(ValueError, match="step 0 asks for 2 groups, but only 1 are generated"):
        buffer.take(0, 2)


def test_a_source_that_runs_short_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    (group,) = buffer.reserve(1)
    buffer.requeue(group)

    class Dry:
        get = buffer.source.get

        def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
            raise ValueError("gave 0 prompts where 2 were asked for")

    buffer.source = Dry()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="gave 0 prompts where 2 were asked for"):
        buffer.reserve(3)
    assert buffer.counts()["waiting"] == 1


def fill_with_version(group: Group, version: int) -> Group:
    fill(group)
    for sample in group.samples:
        sample.weight_versions = [version] * sample.response_length
    return group


@pytest.mark.parametrize(
    ("policy", "order"), [("oldest_first", [0, 1, 2]), ("freshest_first", [1, 2, 0]), ("stalest_first", [0, 2, 1])]
)
def test_policies_choose_by_age(tmp_path: Path, policy: str, order: list[int]) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", policy)
    for group, version in zip(buffer.reserve(3), (1, 7, 4), strict=True):
        buffer.admit(fill_with_version(group, version))
    assert indices(resume(tmp_path, buffer, "--buffer-filter-path", policy).take(0, 3)) == order
    assert [indices(buffer.take(step, 1))[0] for step in range(3)] == order


def test_high_variance_groups_may_train_first(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", "by_reward_variance")
    for group, spread in zip(buffer.reserve(3), (0.0, 1.0, 0.5), strict=True):
        fill(group)
        group.samples[0].reward, group.samples[1].reward = 0.1, 0.1 + spread
        buffer.admit(group)
    assert indices(buffer.take(0, 3)) == [1, 2, 0]


def last_first(config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
    return groups[::-1][:num_groups]


def makes_its_own(config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
    return [Group(group_index=77, source_index=0, epoch=0, samples=groups[0].samples)] * num_groups


def gives_too_few(config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
    return groups[:1]


def gives_one_twice(config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
    return groups[:1] * num_groups


def test_an_own_policy_chooses(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:last_first")
    for group in buffer.reserve(5):
        buffer.admit(fill(group))
    assert indices(buffer.take(0, 2)) == [4, 3]
    assert indices(buffer.take(1, 2)) == [2, 1]


class EveryOther:
    """Passes over the groups that it has seen an odd number of times: what it does depends on its past."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def __call__(self, config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
        for group in groups:
            self.seen[group.group_index] = self.seen.get(group.group_index, 0) + 1
        return sorted(groups, key=lambda g: (self.seen[g.group_index] % 2, g.group_index))[:num_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


EVERY_OTHER = EveryOther()


def test_what_a_policy_remembers_is_part_of_the_state(tmp_path: Path) -> None:
    flags = ("--buffer-filter-path", "test_ledger_buffer:EVERY_OTHER")
    buffer = make_buffer(tmp_path, *flags)
    for group in buffer.reserve(4):
        buffer.admit(fill(group))
    assert indices(buffer.take(0, 1)) == [0]
    buffer.commit(0)
    for group in buffer.reserve(1):
        buffer.admit(fill(group))
    state = saved(buffer)
    assert indices(buffer.take(1, 2)) == [1, 2]
    assert EVERY_OTHER.seen == {0: 1, 1: 2, 2: 2, 3: 2, 4: 1}
    resumed = make_buffer(tmp_path, *flags)
    resumed.load_state_dict(state)
    assert EVERY_OTHER.seen == {0: 1, 1: 1, 2: 1, 3: 1}
    assert indices(resumed.take(1, 2)) == [1, 2]
    plain = make_buffer(tmp_path)
    plain.load_state_dict(state)  # another policy goes on without it
    assert indices(plain.take(1, 2)) == [1, 2]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("makes_its_own", r"returned groups that it was not given: \[77\]"),
        ("gives_too_few", "returned 1 groups for step 0, which trains on 2"),
        ("gives_one_twice", "returned a group twice"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_named_and_nothing_changes(tmp_path: Path, policy: str, message: str) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:{policy}")
    for group in buffer.reserve(3):
        buffer.admit(fill(group))
    with pytest.raises(ValueError, match=message):
        buffer.take(0, 2)
    assert len(buffer) == 3


def test_an_unknown_policy_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--buffer-filter-path: 'oldestfirst' is not .*did you mean 'oldest_first'"):
        make_buffer(tmp_path, "--buffer-filter-path", "oldestfirst")


def test_loading_another_dataset_is_refused_before_anything_changes(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    buffer.reserve(2)
    other = make_buffer(tmp_path, "--prompt-data", str(write_prompts(tmp_path / "other.jsonl", 3)))
    with pytest.raises(ValueError, match=r"trained on prompts.jsonl .* is other.jsonl"):
        other.load_state_dict(saved(buffer))
    assert indices(other.reserve(1)) == [0]


def test_committed_groups_release_their_payload(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    for step in range(5):
        train(buffer, step, 4)
    assert len(buffer.payloads) == 0
    assert buffer.payloads.memory_bytes == 0
    assert len(buffer.state_dict()["records"]) == 0


def test_a_generated_group_may_be_dropped_when_it_got_too_old(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    groups = [fill(group) for group in buffer.reserve(3)]
    for group in groups:
        buffer.admit(group)
    buffer.drop(groups[0], "stale")
    assert indices(buffer.take(0, 2)) == [1, 2]
    assert buffer.counts()["dropped/stale"] == 1


def test_a_group_that_was_requeued_for_its_age_is_generated_anew_and_trains_once(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    for group in buffer.reserve(3):
        buffer.admit(fill(group))  # version 4
    assert buffer.expire(5, "requeue") == (3, 24)
    assert buffer.counts()["requeued/stale"] == 3 and len(buffer) == 0
    again = buffer.reserve(4)
    assert indices(again) == [0, 1, 2, 3]
    assert [group.attempts for group in again] == [0, 0, 0, 0]
    for group in again:
        for sample in fill(group).samples:
            sample.weight_versions = [5] * sample.response_length
        buffer.admit(group)
    assert buffer.expire(5, "drop") == (0, 0)
    assert indices(buffer.take(0, 3)) == [0, 1, 2]
    assert indices(buffer.take(1, 1)) == [3]


def test_being_too_old_counts_as_an_attempt_and_the_last_one_is_dropped(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, "--max-group-attempts", "3")
    for attempt in range(3):
        (group,) = buffer.reserve(1)
        assert (group.group_index, group.attempts) == (0, attempt)
        group.attempts += 1  # as the runner does when it begins
        buffer.admit(fill(group))
        buffer = resume(tmp_path, buffer, "--max-group-attempts", "3")
        assert buffer.expire(5, "requeue") == (1, 7)
    counts = buffer.counts()
    assert (counts["requeued/stale"], counts["dropped/stale"], counts["waiting"]) == (2, 1, 0)
    assert indices(buffer.reserve(1)) == [1]


def test_a_step_that_had_taken_groups_which_expired_takes_others(tmp_path: Path) -> None:
    flags = ("--rollout-ahead", "1")
    buffer = make_buffer(tmp_path, *flags)
    for number, group in enumerate(buffer.reserve(4)):
        for sample in fill(group).samples:
            sample.weight_versions = [number] * sample.response_length
        buffer.admit(group)
    buffer.take(0, 2)
    resumed = resume(tmp_path, buffer, *flags)
    assert resumed.expire(1, "drop") == (1, 7)
    assert indices(resumed.take(0, 2)) == [1, 2]
    assert resumed.counts()["dropped/stale"] == 1


def test_seven_prompts_in_steps_of_three_all_train_once_an_epoch(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, "--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 7)))
    trained = [entry for step in range(7) for entry in train(buffer, step, 3)]
    rows_of = [sorted(row for _, epoch, row in trained if epoch == n) for n in range(3)]
    assert rows_of == [[0, 1, 2, 3, 4, 5, 6]] * 3
    assert buffer.counts()["committed"] == 21 and len(buffer) == 0


def test_what_finished_beyond_a_step_trains_in_the_next_ones_also_after_a_resume(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    for group in buffer.reserve(7):
        buffer.admit(fill(group))
    assert indices(buffer.take(0, 3)) == [0, 1, 2]
    buffer.commit(0)
    buffer = resume(tmp_path, buffer)
    assert len(buffer) == 4
    assert [group for group, _, _ in train(buffer, 1, 3)] == [3, 4, 5]
    assert indices(buffer.take(2, 1)) == [6]


BROKEN_KEY = Ranking(lambda summary: 1 / (summary.group_index - 1))
NO_ORDER = Ranking(lambda summary: {"group": summary.group_index})
NAN_KEY = Ranking(lambda summary: (float("nan"), 0) if summary.group_index == 1 else (0.0, 0))
TWO_KINDS = Ranking(lambda summary: "one" if summary.group_index == 1 else summary.group_index)


BROKEN_KEYS = [
    ("BROKEN_KEY", "ZeroDivisionError"),
    ("NO_ORDER", "TypeError"),
    ("NAN_KEY", "ValueError: .* has no place in an order"),
    ("TWO_KINDS", "TypeError: '<' not supported between"),
]


@pytest.mark.parametrize(("name", "error"), BROKEN_KEYS)
def test_a_ranking_whose_key_fails_is_named_before_the_account_changes(tmp_path: Path, name: str, error: str) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:{name}")
    groups = [fill(group) for group in buffer.reserve(2)]
    with pytest.raises(ValueError, match=f"--buffer-filter-path {__name__}:{name}: its key raised {error}.*group 1"):
        for group in groups[name == "NO_ORDER" :]:
            buffer.admit(group)
    assert buffer.counts()["reserved"] >= 1
    make_buffer(tmp_path).load_state_dict(saved(buffer))  # the checkpoint that the ending run writes
    buffer.drop(groups[1], "unranked")


def test_a_step_that_is_committed_takes_no_more_groups(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    train(buffer, 0, 2)
    for group in buffer.reserve(2):
        buffer.admit(fill(group))
    for again in (buffer, resume(tmp_path, buffer)):
        with pytest.raises(ValueError, match="step 0 cannot take groups: step 0 is committed already"):
            again.take(0, 2)
        with pytest.raises(ValueError, match="step 1 cannot take -1 groups"):
            again.take(1, -1)
        assert len(again) == 2


def test_a_step_of_another_size_after_a_resume_begins_with_what_it_had_taken(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", "freshest_first")
    for number, group in enumerate(buffer.reserve(5)):
        buffer.admit(fill_with_version(group, number))
    assert indices(buffer.take(0, 2)) == [4, 3]
    resumed = resume(tmp_path, buffer, "--buffer-filter-path", "freshest_first")
    assert indices(resumed.take(0, 3)) == [4, 3, 2]
    assert indices(resumed.take(1, 2)) == [1, 0]


class OtherState(EveryOther):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("nothing to save")


FIRST, SECOND, STATELESS = EveryOther(), EveryOther(), OtherState()


def test_the_state_of_a_filter_is_not_given_to_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved(make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:FIRST"))

    def fail(self: EveryOther, state: dict[str, Any]) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(EveryOther, "load_state_dict", fail)
    make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:SECOND").load_state_dict(state)
    assert f"the state of --buffer-filter-path {__name__}:FIRST is not used" in caplog.text
    with pytest.raises(
        ValueError, match=f"^--buffer-filter-path {__name__}:FIRST raised KeyError: 'mine' at .*saved state"
    ):
        make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:FIRST").load_state_dict(state)
    with pytest.raises(
        ValueError, match=f"^--buffer-filter-path {__name__}:STATELESS raised RuntimeError: nothing to save"
    ):
        make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:STATELESS").state_dict()
