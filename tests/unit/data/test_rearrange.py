from __future__ import annotations

from typing import Any

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


def empty() -> DataProto:
    return make(0)


def test_operations_on_no_rows_give_no_rows_and_keep_the_fields() -> None:
    pieces = empty().split(4)
    assert [rows(piece) for piece in pieces] == [[]]
    for batch in (
        DataProto.concat(pieces),
        DataProto.concat([empty(), empty()]),
        empty().repeat(3),
        empty().repeat_each([]),
        empty().pad_to_divisor(4)[0],
        empty().chunk(2, auto_padding=True)[1],
        make(3).repeat(0),
        make(3).repeat_each([0, 0, 0]),
        make(3)[[]],
        make(3)[np.array([])],
        make(3)[2:1],
        make(3)[torch.zeros(3, dtype=torch.bool)],
    ):
        assert rows(batch) == [] and batch.keys() == ["x", "r", "name"]
    assert empty().pad_to_divisor(4)[1] == 0
    assert rows(DataProto.concat([empty(), make(2), empty()])) == [0, 1]
    assert list(empty().make_iterator(2, epochs=3)) == []
    batch = empty()
    batch.reorder([])
    assert rows(batch) == []
    columns = empty().select(["x", "name"])
    assert columns.fold_batch_dim(2)["x"].shape == (2, 0)
    assert DataProto({"x": torch.zeros(2, 0, 3)}).unfold_batch_dim()["x"].shape == (0, 3)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", None, torch.tensor(1.0)])
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda b, v: b.repeat(v), "repeat: times must be a whole number >= 0"),
        (lambda b, v: b.repeat_each([1, v, 1]), "repeat_each: the count of row 1 must be a whole number >= 0"),
        (lambda b, v: b.chunk(v), "chunk: the number of chunks must be a whole number >= 1"),
        (lambda b, v: b.split(v), "split: rows per piece must be a whole number >= 1"),
        (lambda b, v: b.pad_to_divisor(v), "pad_to_divisor: the divisor must be a whole number >= 1"),
        (lambda b, v: b.unpad(v), "unpad: the number of rows must be a whole number >= 0"),
        (lambda b, v: b.fold_batch_dim(v), "fold_batch_dim: the new batch size must be a whole number >= 1"),
        (lambda b, v: b.unfold_batch_dim(v), "unfold_batch_dim: the number of dimensions must be a whole number >= 1"),
        (lambda b, v: b.unfold_column_chunks(v, ["x"]), "unfold_column_chunks: the number of chunks must be"),
        (lambda b, v: b.make_iterator(v), "make_iterator: the mini-batch size must be a whole number >= 1"),
        (lambda b, v: b.make_iterator(1, epochs=v), "make_iterator: epochs must be a whole number >= 0"),
    ],
)
def test_a_count_that_is_none_is_named_with_its_operation(operation: Any, message: str, value: Any) -> None:
    if value is None and "dimensions" in message:
        return
    with pytest.raises(ValueError, match=message):
        operation(make(3).select(["x", "name"]), value)


def test_counts_may_come_from_numpy_and_torch() -> None:
    assert rows(make(2).repeat(np.int64(2))) == rows(make(2).repeat(torch.tensor(2))) == [0, 0, 1, 1]
    assert rows(make(2).repeat_each(np.array([0, 2]))) == rows(make(2).repeat_each(torch.tensor([0, 2]))) == [1, 1]
    assert rows(make(3).unpad(np.int32(1))) == [0, 1]


@pytest.mark.parametrize("times", [2, 1.5, torch.tensor(3), torch.tensor([[1, 2, 3]]), torch.tensor([0.5, 1.0, 1.0])])
def test_repeat_each_wants_a_whole_number_for_each_row(times: Any) -> None:
    with pytest.raises(ValueError, match="repeat_each"):
        make(3).repeat_each(times)


@pytest.mark.parametrize(
    "order",
    [[0, 1], [0, 1, 2, 9], [-9, 0, 1, 2], [0, 0, 1, 2], [0.0, 1.0, 2.0, 3.0], [True, False, True, False], slice(0, 2)],
)
def test_an_order_that_is_no_permutation_is_refused_and_nothing_moves(order: Any) -> None:
    batch = make(4)
    with pytest.raises(ValueError, match=r"order must name each of the 4 rows once|must be integers"):
        batch.reorder(order)
    assert rows(batch) == [0, 1, 2, 3]


def test_a_slice_and_negative_rows_are_orders_too() -> None:
    batch = make(4)
    batch.reorder(slice(None, None, -1))
    assert rows(batch) == [3, 2, 1, 0]
    batch.reorder([-1, -2, -3, -4])
    assert rows(batch) == [0, 1, 2, 3]


def test_concat_names_an_array_of_another_kind() -> None:
    objects = DataProto(None, {"name": object_array(["a"])})
    with pytest.raises(ValueError, match="concat: 'name' differs in dtype or shape"):
        DataProto.concat([objects, DataProto(None, {"name": np.array([1.5])})])
    with pytest.raises(ValueError, match="concat: 'name' differs in dtype or shape"):
        DataProto.concat([DataProto(None, {"name": np.zeros((1, 2))}), DataProto(None, {"name": np.zeros((1, 3))})])
    texts = [DataProto(None, {"name": np.array(["a"])}), DataProto(None, {"name": np.array(["abc"])})]
    assert DataProto.concat(texts)["name"].tolist() == ["a", "abc"]


def test_unfold_names_a_field_with_too_few_dimensions() -> None:
    with pytest.raises(ValueError, match=r"unfold_batch_dim: 'x' must have 2 dimensions or more, got \(3,\)"):
        make(3).select(["x"]).unfold_batch_dim()


def test_numbers_may_be_integers_of_any_library_and_are_checked_at_the_call() -> None:
    batch = DataProto({"a": torch.arange(4)})
    wanted = [b["a"].tolist() for b in batch.make_iterator(2, 1, seed=3)]
    for number in (np.int64, torch.tensor):
        assert [b["a"].tolist() for b in batch.make_iterator(number(2), number(1), seed=number(3))] == wanted
        padded, pad_size = batch.pad_to_divisor(number(3))
        assert (len(padded), pad_size, type(pad_size)) == (6, 2, int)
    for arguments, message in (
        ((2.0,), "mini-batch size must be a whole number >= 1, got 2.0"),
        ((2, -1), "epochs must be a whole number >= 0"),
        ((2, 1, -1), "the seed must be a whole number >= 0"),
        ((2, 1, 1 << 63), r"the seed must be < 2\*\*63"),
        ((2, 1, "x"), "the seed must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.make_iterator(*arguments)


def test_concat_takes_any_iterable_of_batches_alone() -> None:
    batch = DataProto({"a": torch.arange(2)})
    assert DataProto.concat(batch for _ in range(2))["a"].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="at least one part"):
        DataProto.concat(iter(()))
    with pytest.raises(ValueError, match="joins batches, got NoneType"):
        DataProto.concat([batch, None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"meta_info\['metrics'\] must hold dictionaries, got 5"):
        DataProto.concat([DataProto({"a": torch.ones(1)}, {}, {"metrics": 5})])
