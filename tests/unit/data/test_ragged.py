from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from slime_rl.data.ragged import Ragged

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def make() -> Ragged:
    return Ragged.from_list(ROWS, torch.int64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float32, torch.bfloat16, torch.bool])
def test_from_list_keeps_rows_and_dtype(dtype: torch.dtype) -> None:
    ragged = Ragged.from_list(ROWS, dtype)
    assert ragged.dtype == dtype
    assert ragged.lengths.tolist() == [3, 0, 1, 2]
    assert [row.tolist() for row in ragged.rows()] == [torch.tensor(r).to(dtype).tolist() for r in ROWS]


def test_to_list_gives_equal_rows_back_whether_their_numbers_change_or_not() -> None:
    rows = [[3, 3, 3], [], [3, 4], [4], [4, 4, 5], [5, 5], [], [1, 1, 2, 2, 1]]
    for dtype in (torch.int64, torch.int8, torch.bool, torch.float64):
        typed = [torch.tensor(row).to(dtype).tolist() for row in rows]
        found = Ragged.from_list(typed, dtype).to_list()
        assert found == typed and [type(x) for row in found for x in row] == [type(x) for row in typed for x in row]
    source = random.Random(0)
    many = [[source.randint(0, 1) for _ in range(source.randint(0, 4))] for _ in range(500)]
    assert Ragged.from_list(many, torch.int32).to_list() == many
    for empty in ([], [[], []]):
        assert Ragged.from_list(empty, torch.int32).to_list() == empty


def test_from_list_takes_tensors_and_arrays() -> None:
    assert Ragged.from_list([torch.tensor([1, 2, 3]), torch.tensor([]).long(), torch.tensor([4])]) == make()[:3]
    assert Ragged.from_list([np.array([1, 2, 3]), np.array([], dtype=np.int64), np.array([4])]) == make()[:3]


@pytest.mark.parametrize(
    ("item", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([3, 0, 0], [3, 0, 0]),
        ([-1], [3]),
        ([], []),
        (torch.tensor([2, 1]), [2, 1]),
        (np.array([True, False, False, True]), [0, 3]),
        ([True, False, True, False], [0, 2]),
    ],
)
def test_index_by_slice_list_tensor_and_mask(item: object, rows: list[int]) -> None:
    assert make()[item].to_list() == [ROWS[i] for i in rows]


def test_a_row_and_a_slice_share_memory() -> None:
    ragged = make()
    ragged[0][0] = 100
    ragged[2:].values[0] = 400
    assert ragged.to_list() == [[100, 2, 3], [], [400], [5, 6]]


def test_a_row_that_does_not_exist_and_a_mask_of_another_length_are_refused() -> None:
    with pytest.raises(IndexError, match="row 4 of 4"):
        make()[4]
    with pytest.raises(IndexError, match="row 4 of 4"):
        make()[[0, 4]]
    with pytest.raises(ValueError, match="2 entries for 4 rows"):
        make()[[True, False]]


def test_concat_and_padding() -> None:
    both = Ragged.concat([make()[:2], make()[2:]])
    assert both == make()
    assert make().to_padded(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1]]
    with pytest.raises(ValueError, match="dtypes"):
        Ragged.concat([make(), Ragged.from_list(ROWS, torch.int32)])


def test_rows_may_have_more_dimensions() -> None:
    ragged = Ragged.from_lengths(torch.arange(12).reshape(6, 2), [2, 1, 3])
    assert ragged[1].tolist() == [[4, 5]]
    assert ragged[[2, 0]].values.tolist() == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3]]
    assert ragged.to_padded().shape == (3, 3, 2)


def test_offsets_must_fit_the_values() -> None:
    with pytest.raises(ValueError, match="rise from 0"):
        Ragged(torch.arange(3), torch.tensor([0, 2, 1, 3]))
    with pytest.raises(ValueError, match="rise from 0"):
        Ragged(torch.arange(3), torch.tensor([0, 2]))


def test_equality_sees_values_rows_and_dtype_and_takes_nan_for_nan() -> None:
    nan = Ragged.from_list([[float("nan")], [1.0]], torch.float32)
    assert nan == Ragged.from_list([[float("nan")], [1.0]], torch.float32)
    assert make() != Ragged.from_list(ROWS, torch.int32)
    assert make() != Ragged.from_lengths(make().values, [2, 1, 1, 2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_pickling_hands_the_memory_over_out_of_band(dtype: torch.dtype) -> None:
    ragged = Ragged.from_list([list(range(50_000)), [1]], dtype)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(ragged, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    again = pickle.loads(stream, buffers=buffers)
    assert again == ragged
    assert again.values.data_ptr() == ragged.values.data_ptr()


@pytest.mark.parametrize(
    ("rows", "dtype", "message"),
    [
        ([[1, 2], [3, None]], torch.int64, "no numbers of torch.int64"),
        ([["a"], ["b"]], None, "row 0 is no list of numbers"),
        ([[1, "a"]], None, "row 0 is no list of numbers"),
        ([[1], 2], torch.int64, r"row 0 of \(1,\) and row 1 of \(\)"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], None, r"row 0 of \(2, 3\) and row 1 of \(2, 4\)"),
        ([torch.tensor(1.0)], None, r"row 0 of \(\)"),
        ([torch.zeros(2), [1.0]], None, "rows are all tensors or none is"),
        ([[[1, 2], [3]]], torch.float32, "no numbers of torch.float32"),
        ([[2**70]], torch.int64, "no numbers of torch.int64"),
    ],
)
def test_rows_that_are_no_numbers_or_do_not_fit_together_are_named(rows: Any, dtype: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Ragged.from_list: .*{message}"):
        Ragged.from_list(rows, dtype)


@pytest.mark.parametrize("lengths", ["ab", 2, [1.0, 1.0], [1.9, 0.1], [True, True], [[1], [1]], None])
def test_lengths_are_whole_numbers(lengths: Any) -> None:
    with pytest.raises(ValueError, match="lengths must be whole numbers"):
        Ragged.from_lengths(torch.arange(2), lengths)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.int64, math.nan), (torch.int64, 0.5), (torch.uint8, -1), (torch.uint8, 300), (torch.bool, 2)],
)
def test_padding_that_would_become_something_else_is_refused(dtype: torch.dtype, pad: float) -> None:
    with pytest.raises(ValueError, match=f"to_padded: {dtype} cannot hold the padding {pad}"):
        Ragged.from_list([[1], [1, 0]], dtype).to_padded(pad)


def test_what_is_no_ragged_cannot_be_one_or_join_one() -> None:
    for values, offsets in (
        ([1], torch.tensor([0, 1])),
        (torch.tensor([1]), [0, 1]),
        (torch.tensor(1), torch.tensor([0, 1])),
    ):
        with pytest.raises(ValueError, match="of a Ragged must be a dense Tensor with rows"):
            Ragged(values, offsets)  # pyright: ignore
    with pytest.raises(ValueError, match="joins Ragged fields, got Tensor"):
        Ragged.concat([Ragged.from_list([[1]]), torch.ones(2)])  # pyright: ignore
