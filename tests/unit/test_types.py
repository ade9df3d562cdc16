from __future__ import annotations

import pytest

from slime_rl.types import Group, Sample, Status


def make_sample(index: int = 0) -> Sample:
    sample = Sample(index=index, group_index=0, rollout_id=index, prompt="1+1=")
    sample.set_prompt_tokens([5, 6])
    return sample


def assert_aligned(sample: Sample) -> None:
    response = len(sample.tokens) - sample.prompt_length
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == len(sample.weight_versions) == response


def test_append_keeps_every_response_field_aligned() -> None:
    sample = make_sample()
    sample.append_tokens([7, 8], log_probs=[-0.5, -1.0], versions=[3, 4])
    sample.append_tokens([9], trained=False)
    sample.append_tokens([10], log_probs=[-2.0], versions=[4])
    assert sample.tokens == [5, 6, 7, 8, 9, 10]
    assert sample.response_tokens == [7, 8, 9, 10]
    assert sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -1.0, 0.0, -2.0]
    assert sample.weight_versions == [3, 4, -1, 4]
    assert_aligned(sample)


def test_append_of_nothing_changes_nothing() -> None:
    sample = make_sample()
    sample.append_tokens([], log_probs=[], versions=[])
    assert sample.tokens == [5, 6] and sample.response_length == 0


@pytest.mark.parametrize(
    ("log_probs", "versions"),
    [([-0.5], [3, 3]), ([-0.5, -0.5], [3]), (None, [3, 3]), ([-0.5, -0.5], None), (None, None)],
)
def test_append_of_unequal_lengths_is_refused_and_changes_nothing(
    log_probs: list[float] | None, versions: list[int] | None
) -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match=r"sample 0: tokens, log-probs and versions must have equal lengths"):
        sample.append_tokens([7, 8], log_probs=log_probs, versions=versions)
    assert sample.tokens == [5, 6]
    assert_aligned(sample)


def test_sampled_tokens_can_be_masked_out_with_their_log_probs() -> None:
    sample = make_sample()
    sample.append_tokens([7], log_probs=[-0.5], versions=[2], trained=False)
    assert (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions) == ([0], [-0.5], [2])


def test_prompt_tokens_cannot_change_after_generation_began() -> None:
    sample = make_sample()
    sample.append_tokens([7], log_probs=[-0.5], versions=[0])
    with pytest.raises(ValueError, match="sample 0: prompt tokens cannot change after 1 were sampled"):
        sample.set_prompt_tokens([1])


def test_prompt_tokens_are_copied() -> None:
    tokens = [1, 2, 3]
    sample = make_sample()
    sample.set_prompt_tokens(tokens)
    sample.append_tokens([7], log_probs=[-0.5], versions=[0])
    assert tokens == [1, 2, 3]


def test_only_whole_answers_are_finished() -> None:
    assert {status for status in Status if status.is_finished} == {Status.COMPLETED, Status.TRUNCATED}


def test_oldest_version_of_a_group_ignores_text_that_no_model_sampled() -> None:
    first, second = make_sample(0), make_sample(1)
    group = Group(group_index=0, source_index=0, epoch=0, samples=[first, second])
    assert group.oldest_version is None
    first.append_tokens([7, 8], log_probs=[-0.5, -0.5], versions=[6, 5])
    second.append_tokens([9], trained=False)
    assert group.oldest_version == 5


def test_samples_do_not_share_their_lists() -> None:
    first, second = make_sample(0), make_sample(1)
    first.append_tokens([7], log_probs=[-0.5], versions=[0])
    first.metadata["key"] = 1
    assert second.response_length == 0 and second.metadata == {}
