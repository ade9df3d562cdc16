from __future__ import annotations

import pickle
import random

import pytest
import torch

from slime_rl.data.batches import (
    RolloutBatch,
    TokenFields,
    fields_of_batch,
    rollout_batch_from_groups,
    split_for_data_parallel,
)
from slime_rl.data.proto import DataProto
from slime_rl.data.ragged import Ragged
from slime_rl.types import Group, Sample


def make_groups(num_groups: int, group_size: int = 2, seed: int = 0, max_len: int = 30) -> list[Group]:
    rng = random.Random(seed)
    groups = []
    for g in range(num_groups):
        samples = []
        for i in range(group_size):
            index = g * group_size + i
            sample = Sample(index=index, group_index=g + 100, rollout_id=index, prompt="p", reward=float(i))
            sample.set_prompt_tokens([1] * (g + 1))
            n = rng.randint(1, max_len)
            sample.append_tokens([7] * n, log_probs=[-1.0] * n, versions=[2] * n)
            samples.append(sample)
        groups.append(Group(group_index=g + 100, source_index=g, epoch=0, samples=samples))
    return groups


def test_batch_holds_the_groups_in_order() -> None:
    groups = make_groups(3)
    batch = rollout_batch_from_groups(groups, step=5, weight_version=4)
    samples = [s for g in groups for s in g.samples]
    assert batch["tokens"].to_list() == [s.tokens for s in samples]
    assert batch.total_lengths.tolist() == [len(s.tokens) for s in samples]
    assert batch.response_lengths.tolist() == [s.response_length for s in samples]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["rollout_ids"].tolist() == batch["sample_ids"].tolist() == list(range(6))
    assert batch["rewards"].tolist() == [0.0, 1.0] * 3
    assert batch["weight_versions"].dtype == torch.int32
    assert batch.meta_info == {"step": 5, "weight_version": 4, "num_samples": 6}


@pytest.mark.parametrize(
    ("num_groups", "num_updates", "expected"),
    [(4, 2, [0, 0, 0, 0, 1, 1, 1, 1]), (3, 2, [0, 0, 0, 1, 1, 1]), (2, 4, [0, 1, 2, 3]), (2, 1, [0, 0, 0, 0])],
)
def test_updates_are_contiguous_blocks_and_keep_groups_whole_where_they_divide(
    num_groups: int, num_updates: int, expected: list[int]
) -> None:
    batch = rollout_batch_from_groups(make_groups(num_groups), 0, 0, num_updates)
    assert batch["update_ids"].tolist() == expected


def test_each_role_of_a_group_is_compared_with_itself_only() -> None:
    groups = make_groups(2, group_size=4)
    for group in groups:
        for i, sample in enumerate(group.samples):
            sample.metadata["agent"] = {"role": ("first", "second")[i % 2]}
    batch = rollout_batch_from_groups(groups, 0, 0, 2)
    assert batch["group_ids"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert batch["update_ids"].tolist() == [0] * 4 + [1] * 4


def test_groups_of_unequal_size_stay_whole() -> None:
    groups = make_groups(2)
    groups[0].samples.append(make_groups(1)[0].samples[0])
    assert rollout_batch_from_groups(groups, 0, 0, 2)["update_ids"].tolist() == [0, 0, 0, 1, 1]


def test_a_step_without_a_token_in_its_loss_is_refused() -> None:
    groups = make_groups(2)
    for sample in (sample for group in groups for sample in group.samples):
        sample.loss_mask = [0] * sample.response_length
    with pytest.raises(ValueError, match="step 3 has nothing to train on: the loss masks of its 4 samples are all 0"):
        rollout_batch_from_groups(groups, 3, 3)
    groups[1].samples[0].loss_mask[0] = 1
    assert rollout_batch_from_groups(groups, 3, 3)["loss_mask"].values.sum() == 1


def test_bad_batches_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        rollout_batch_from_groups([], 0, 0)
    with pytest.raises(ValueError, match="divides neither 2 groups nor 4 samples"):
        rollout_batch_from_groups(make_groups(2), 0, 0, 3)
    groups = make_groups(1)
    groups[0].samples[1].reward = None
    with pytest.raises(ValueError, match=r"sample 1 \(group 100\) has no reward"):
        rollout_batch_from_groups(groups, 0, 0)


def test_a_missing_or_mistyped_field_is_named() -> None:
    batch = rollout_batch_from_groups(make_groups(2), 0, 0)
    fields = dict(batch.tensors)
    with pytest.raises(ValueError, match="no 'rewards'"):
        RolloutBatch({k: v for k, v in fields.items() if k != "rewards"}, None, batch.meta_info)
    with pytest.raises(ValueError, match=r"'rewards' .* must be dense torch.float32, got dense torch.float64"):
        RolloutBatch({**fields, "rewards": fields["rewards"].double()}, None, batch.meta_info)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"'tokens' .* must be ragged"):
        RolloutBatch({**fields, "tokens": torch.zeros(4, dtype=torch.int64)}, None, batch.meta_info)
    with pytest.raises(ValueError, match=r"no \['step'\]"):
        RolloutBatch(fields, None, {"weight_version": 0, "num_samples": 4})
    short = Ragged.from_list([[1.0]] * 4, torch.float32)
    with pytest.raises(ValueError, match="'loss_mask' of row 0 has 1 tokens, its response has"):
        RolloutBatch({**fields, "loss_mask": short}, None, batch.meta_info)


def test_rows_of_a_batch_are_a_batch_and_columns_are_not() -> None:
    batch = rollout_batch_from_groups(make_groups(2), 0, 0)
    assert type(batch[1:3]) is RolloutBatch
    assert type(batch.select(["tokens"])) is DataProto
    assert type(pickle.loads(pickle.dumps(batch))) is RolloutBatch
    extended = batch.union(DataProto({"old_log_probs": torch.zeros(4)}))
    assert "old_log_probs" in extended[:2]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_updates", [1, 2, 4])
def test_every_rank_gets_a_share_of_every_update(dp_size: int, num_updates: int) -> None:
    batch = rollout_batch_from_groups(make_groups(8), 0, 0, num_updates)
    parts = split_for_data_parallel(batch, dp_size)
    assert sorted(i for p in parts for i in p["sample_ids"].tolist()) == list(range(16))
    for update in range(num_updates):
        counts = [int((p["update_ids"] == update).sum()) for p in parts]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
    for part in parts:
        assert part["sample_ids"].tolist() == sorted(part["sample_ids"].tolist())
        assert part.meta_info["num_samples"] == 16


def test_ranks_are_balanced_by_tokens() -> None:
    batch = rollout_batch_from_groups(make_groups(64, 4, seed=3, max_len=500), 0, 0)
    tokens = [int(p.total_lengths.sum()) for p in split_for_data_parallel(batch, 4)]
    assert max(tokens) / min(tokens) < 1.02


def test_fewer_samples_than_ranks_are_refused() -> None:
    batch = rollout_batch_from_groups(make_groups(2), 0, 0, 2)
    with pytest.raises(ValueError, match="update 0 has 2 samples for 3 data-parallel ranks"):
        split_for_data_parallel(batch, 3)


def test_token_fields_find_their_samples_however_either_side_is_split() -> None:
    batch = rollout_batch_from_groups(make_groups(6), step=0, weight_version=0)
    values = torch.arange(len(batch.ragged("loss_mask").values), dtype=torch.float32)
    whole = TokenFields.of(batch, {"values": values, "old": -values}, {})
    for senders in (1, 2, 3):
        parts = []
        for shard in split_for_data_parallel(batch, senders):
            own = fields_of_batch([whole], shard)
            parts += [TokenFields.of(shard, {name: own[name]}, {}) for name in own]
        for receivers in (1, 2, 4):
            for shard in split_for_data_parallel(batch, receivers):
                mixed = shard.select_rows(torch.randperm(len(shard)))
                found = fields_of_batch(pickle.loads(pickle.dumps(parts)), mixed)
                wanted = Ragged(values, batch.ragged("loss_mask").offsets)[mixed.dense("sample_ids")].values
                assert torch.equal(found["values"], wanted) and torch.equal(found["old"], -wanted)


def test_token_fields_that_do_not_fit_are_refused() -> None:
    batch = rollout_batch_from_groups(make_groups(3), step=0, weight_version=0)
    values = torch.zeros(len(batch.ragged("loss_mask").values))
    half = batch.select_rows([0, 1, 2])
    part = TokenFields.of(half, {"values": values[: len(half.ragged("loss_mask").values)]}, {})
    with pytest.raises(ValueError, match=r"'values' is missing for the samples \[3, 4, 5\]"):
        fields_of_batch([part], batch)
    whole = TokenFields.of(batch, {"values": values}, {})
    lengths = batch.response_lengths.clone()
    lengths[:2] += torch.tensor([1, -1])
    whole.tensors["values"] = Ragged.from_lengths(values, lengths)
    with pytest.raises(ValueError, match=r"'values' has another number of tokens than the samples \[0, 1\]"):
        fields_of_batch([whole], batch)
