from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_rl.data.proto import DataProto, object_array
from slime_rl.data.ragged import Ragged


def make(n: int = 6, **meta: object) -> DataProto:
    return DataProto(
        {"x": torch.arange(n), "r": Ragged.from_list([[i] * i for i in range(n)], torch.int64)},
        {"name": object_array([str(i) for i in range(n)])},
        meta,
    )


def flat(parts: list[list[int]]) -> list[int]:
    return [row for part in parts for row in part]


def rows(batch: DataProto) -> list[int]:
    """The original row numbers, checked to agree in every field."""
    numbers = batch["x"].tolist()
    assert batch["name"].tolist() == [str(i) for i in numbers]
    assert batch["r"].to_list() == [[i] * i for i in numbers]
    return numbers


def test_chunk_needs_equal_chunks() -> None:
    assert [rows(c) for c in make().chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="6 rows do not divide into 4 equal chunks"):
        make().chunk(4)


def test_chunk_with_auto_padding_is_undone_by_concat_and_unpad() -> None:
    chunks = make().chunk(4, auto_padding=True)
    assert [rows(c) for c in chunks] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    whole = DataProto.concat(chunks)
    assert rows(whole.unpad(whole.meta_info["pad_size"])) == [0, 1, 2, 3, 4, 5]


def test_split_may_leave_a_ragged_tail() -> None:
    assert [rows(c) for c in make().split(4)] == [[0, 1, 2, 3], [4, 5]]


def test_concat_joins_rows_and_lists_metrics() -> None:
    parts = [make(2, step=1, metrics={"loss": 0.5}), make(3, step=1, metrics={"loss": 0.25, "kl": 2.0})]
    whole = DataProto.concat(parts)
    assert rows(whole) == [0, 1, 0, 1, 2]
    assert whole.meta_info == {"step": 1, "metrics": {"loss": [0.5, 0.25], "kl": [2.0]}}


def test_concat_refuses_other_fields_dtypes_and_meta() -> None:
    with pytest.raises(ValueError, match="'step'"):
        DataProto.concat([make(2, step=1), make(2, step=2)])
    with pytest.raises(ValueError, match=r"\['x'\] are not in every part"):
        DataProto.concat([make(2), make(2).select(["r", "name"])])
    with pytest.raises(ValueError, match="'x' differs in kind or dtype"):
        DataProto.concat([DataProto({"x": torch.zeros(1)}), DataProto({"x": torch.zeros(1).long()})])


def test_reorder_is_in_place_and_wants_a_permutation() -> None:
    batch = make(4)
    batch.reorder([3, 1, 0, 2])
    assert rows(batch) == [3, 1, 0, 2]
    with pytest.raises(ValueError, match="each of the 4 rows once"):
        batch.reorder([0, 0, 1, 2])


def test_repeat_interleaved_or_as_blocks_and_per_sample() -> None:
    assert rows(make(3).repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert rows(make(3).repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    assert rows(make(3).repeat_each([0, 3, 1])) == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="one count per row"):
        make(3).repeat_each([1, 2])


@pytest.mark.parametrize(("n", "divisor", "padded"), [(3, 8, [0, 1, 2, 0, 1, 2, 0, 1]), (4, 2, [0, 1, 2, 3])])
def test_pad_to_divisor_cycles_from_the_front_and_unpad_cuts_the_tail(n: int, divisor: int, padded: list[int]) -> None:
    batch, pad_size = make(n).pad_to_divisor(divisor)
    assert rows(batch) == padded
    assert pad_size == len(padded) - n
    assert rows(batch.unpad(pad_size)) == list(range(n))


def test_fold_and_unfold_the_batch_dimension() -> None:
    batch = make().select(["x", "name"])
    folded = batch.fold_batch_dim(2)
    assert folded["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded["name"].tolist() == [["0", "1", "2"], ["3", "4", "5"]]
    assert folded.unfold_batch_dim() == batch
    with pytest.raises(ValueError, match="'r' is ragged"):
        make().fold_batch_dim(2)


def test_unfold_column_chunks_splits_columns_into_rows() -> None:
    batch = DataProto({"pair": torch.arange(8).reshape(2, 4), "id": torch.tensor([7, 8])})
    out = batch.unfold_column_chunks(2, ["pair"])
    assert out["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out["id"].tolist() == [7, 7, 8, 8]
    with pytest.raises(ValueError, match=r"'id' must be dense \[N, C \* 2"):
        batch.unfold_column_chunks(2, ["id"])


def test_iterator_sees_every_row_once_an_epoch_and_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = [rows(b) for b in make().make_iterator(2, epochs=2, seed=5)]
    torch.manual_seed(2)
    np.random.seed(3)
    assert [rows(b) for b in make().make_iterator(2, epochs=2, seed=5)] == first
    assert sorted(flat(first[:3])) == sorted(flat(first[3:])) == list(range(6))
    assert first[:3] != first[3:]
    assert [rows(b) for b in make().make_iterator(3)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="mini-batches of 4"):
        make().make_iterator(4)
