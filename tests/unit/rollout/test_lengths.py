"""What is known of the lengths of responses, and which prompt starts first by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_interruption import Steps, number_of

from slime_rl.rollout.lengths import LengthHistory
from slime_rl.types import Group, Sample, Status


def group_of(source_index: int, *lengths: int, status: Status = Status.ABORTED) -> Group:
    """A group that was interrupted with responses of these lengths."""
    samples = []
    for i, n in enumerate(lengths):
        sample = Sample(index=i, group_index=source_index, rollout_id=i, prompt="p", status=status)
        sample.append_tokens([5] * n, log_probs=[-0.5] * n, versions=[0] * n)
        samples.append(sample)
    return Group(group_index=source_index, source_index=source_index, epoch=0, samples=samples)


def test_what_has_outgrown_its_prediction_is_not_expected_to_end_at_once() -> None:
    history = LengthHistory()
    history.record(0, 100)
    assert history.predict(group_of(0, 0, 0)) == 100
    assert history.predict(group_of(0, 30, 0)) == 100 and history.predict(group_of(0, 30, 40)) == 70
    assert history.predict(group_of(0, 300)) == 300
    groups = [group_of(1, 0), group_of(2, 300), group_of(0, 90)]  # 1 and 2 are known by the mean of all, 100
    assert [group.source_index for group in history.longest_first(groups)] == [2, 1, 0]


def test_samples_that_are_finished_take_no_more_time() -> None:
    history = LengthHistory()
    history.record(0, 100)
    group = group_of(0, 90, 10)
    group.samples[0].status = Status.COMPLETED
    assert history.predict(group) == 90
    group.samples[1].status = Status.FAILED
    assert history.predict(group) == 0


def second_of_prompt_1_is_late(input_ids: list[int]) -> int:
    if number_of(input_ids) != 1:
        return 30 + number_of(input_ids)
    second_of_prompt_1_is_late.calls += 1  # type: ignore[attr-defined]
    return 20 if second_of_prompt_1_is_late.calls % 2 else 500  # type: ignore[attr-defined]


LATE = ("--sample-deadline-s", "100")


@pytest.mark.parametrize(
    "flags",
    [
        (*LATE, "--min-samples-per-group", "1"),  # trains without it
        (*LATE, "--max-group-attempts", "1"),  # is dropped for it
        ("--over-sampling-batch-size", "5"),  # starts again
        ("--dynamic-filter-path", "test_lengths:drop_prompt_1"),
    ],
)
def test_prompts_whose_long_responses_do_not_train_are_known_as_long(tmp_path: Path, flags: tuple[str, ...]) -> None:
    second_of_prompt_1_is_late.calls = 0  # type: ignore[attr-defined]
    order = ("--rollout-order", "longest_first")
    steps = Steps(tmp_path, *order, *flags, length_of=second_of_prompt_1_is_late).run(1)
    rows, tokens = (steps.lengths.state_dict()[name] for name in ("rows", "tokens"))
    known = dict(zip(rows, tokens, strict=True))
    assert known[1] > 29 and known[1] >= max(known.values())


def drop_prompt_1(config: object, group: list[Sample]) -> str | None:
    return "mine" if group[0].group_index == 1 else None
