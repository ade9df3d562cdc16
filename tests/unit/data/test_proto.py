from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slime_rl.data.proto import DataProto, DataProtoItem, object_array
from slime_rl.data.ragged import Ragged


def make(n: int = 4, **meta: object) -> DataProto:
    return DataProto(
        {"x": torch.arange(n * 2.0).reshape(n, 2), "r": Ragged.from_list([[i] * i for i in range(n)], torch.int64)},
        {"text": object_array([f"row {i}" for i in range(n)])},
        {"step": 3, **meta},
    )


def test_fields_must_have_equal_rows() -> None:
    with pytest.raises(ValueError, match=r"equal numbers of rows, got \{'a': 2, 'b': 3\}"):
        DataProto({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"'t'.*numpy array"):
        DataProto({"a": torch.zeros(2)}, {"t": ["x", "y"]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="both a tensor and a non-tensor"):
        DataProto({"a": torch.zeros(2)}, {"a": np.zeros(2)})


def test_from_dict_keeps_lists_as_objects_even_when_they_have_equal_lengths() -> None:
    batch = DataProto.from_dict({"x": [1, 2]}, {"messages": [["a", "b"], ["c", "d"]]})
    assert batch.non_tensors["messages"].shape == (2,)
    assert batch[1]["messages"] == ["c", "d"]


def test_index_by_int_gives_one_item() -> None:
    item = make()[-2]
    assert isinstance(item, DataProtoItem)
    assert item["x"].tolist() == [4.0, 5.0]
    assert item["r"].tolist() == [2, 2]
    assert item["text"] == "row 2"
    with pytest.raises(IndexError):
        make()[4]


@pytest.mark.parametrize(
    ("item", "rows"),
    [(slice(1, 3), [1, 2]), ([2, 0], [2, 0]), (np.array([0, 0, 3]), [0, 0, 3]), ([True, False, False, True], [0, 3])],
)
def test_index_by_slice_list_array_and_mask(item: object, rows: list[int]) -> None:
    part = make()[item]
    assert part["text"].tolist() == [f"row {i}" for i in rows]
    assert part["r"].to_list() == [[i] * i for i in rows]
    assert part["x"][:, 0].tolist() == [2.0 * i for i in rows]
    assert part.meta_info == {"step": 3}


def test_select_shares_storage_unless_asked_not_to() -> None:
    batch = make()
    batch.select(["x"])["x"][0, 0] = 77.0
    assert batch["x"][0, 0] == 77.0
    batch.select(["x"], deepcopy=True)["x"][0, 0] = 1.0
    assert batch["x"][0, 0] == 77.0
    assert batch.select(["text"], meta_keys=[]).meta_info == {}
    with pytest.raises(ValueError, match=r"no field \['nope'\]; there are \['r', 'text', 'x'\]"):
        batch.select(["nope"])


def test_pop_removes_and_returns_and_a_missing_key_removes_nothing() -> None:
    batch = make()
    with pytest.raises(ValueError, match="nope"):
        batch.pop(["x", "nope"])
    popped = batch.pop(["x", "text"], meta_keys=["step"])
    assert popped.keys() == ["x", "text"]
    assert popped.meta_info == {"step": 3}
    assert batch.keys() == ["r"]
    assert batch.meta_info == {}


def test_rename_works_in_place_and_does_not_overwrite() -> None:
    batch = make().rename(["x", "text"], ["y", "words"])
    assert sorted(batch.keys()) == ["r", "words", "y"]
    with pytest.raises(ValueError, match="overwrite"):
        batch.rename("y", "r")


def test_union_adds_in_place_and_refuses_different_values_under_one_name() -> None:
    batch = make()
    result = batch.union(DataProto({"x": batch["x"].clone(), "new": torch.ones(4)}, None, {"lr": 1.0}))
    assert result is batch
    assert batch.meta_info == {"step": 3, "lr": 1.0}
    with pytest.raises(ValueError, match=r"'new'.*different values"):
        batch.union(DataProto({"new": torch.zeros(4)}))
    with pytest.raises(ValueError, match="4 and 3 rows"):
        batch.union(make(3))
    with pytest.raises(ValueError, match="step"):
        batch.union(DataProto(None, None, {"step": 4}))
    assert batch["new"].tolist() == [1.0] * 4


def test_union_takes_nan_for_nan_in_tensors_and_objects() -> None:
    nan = DataProto({"x": torch.tensor([float("nan"), 1.0])}, {"o": object_array([{"s": float("nan")}, None])})
    other = DataProto({"x": torch.tensor([float("nan"), 1.0])}, {"o": object_array([{"s": float("nan")}, None])})
    assert nan.union(other) == other


def test_to_device_moves_dense_and_ragged() -> None:
    moved = make().to("meta")
    assert moved["x"].device.type == "meta"
    assert moved["r"].values.device.type == "meta"


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle_round_trip(protocol: int) -> None:
    batch = make()
    batch.tensors["half"] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch


def test_pickle_hands_memory_over_without_copy_or_warning_even_when_it_is_read_only() -> None:
    batch = DataProto({"x": torch.arange(100_000.0)})
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(stream, buffers=read_only)
    assert again == batch
    assert again["x"].data_ptr() == np.frombuffer(read_only[0], dtype=np.uint8).ctypes.data


@pytest.mark.parametrize(
    "item",
    [
        True,
        np.True_,
        0.5,
        None,
        ...,
        [0.5],
        [0, 1.0],
        ["a"],
        [None],
        [True, 1],
        (0, slice(1)),
        {0, 1},
        slice(0.5, 2),
        slice(None, None, 0),
        [[0, 1]],
        np.array([0.5]),
        np.array(["a"]),
        np.array([0, None], dtype=object),
        torch.tensor([0.5]),
        torch.tensor([1j]),
        torch.tensor([[0]]),
        torch.tensor(True),
        torch.tensor([], dtype=torch.bool),
        [True],
    ],
    ids=repr,
)
def test_what_is_no_index_of_rows_is_refused(item: object) -> None:
    for rows in (make(), make()["r"]):
        with pytest.raises(ValueError, match=r"rows|whole numbers|slice step"):
            rows[item]


def test_row_numbers_of_every_library_choose_rows() -> None:
    batch = make()
    for two in (2, np.int32(2), torch.tensor(2)):
        assert (batch[two]["text"], batch["r"][two].tolist()) == ("row 2", [2, 2])
        assert batch[[two, 0]]["text"].tolist() == ["row 2", "row 0"]
    assert batch[range(1, 3)]["text"].tolist() == ["row 1", "row 2"]
    for row in (4, -5):
        with pytest.raises(IndexError, match=f"row {row} of 4 rows"):
            batch[row]
        with pytest.raises(IndexError, match=f"row {row} of 4 rows"):
            batch[[row]]


def test_from_dict_names_the_field_that_cannot_become_one() -> None:
    with pytest.raises(ValueError, match=r"tensors\['x'\] cannot become a tensor: .*Ragged"):
        DataProto.from_dict({"x": [[1], [1, 2]]})
    with pytest.raises(ValueError, match=r"tensors\['x'\] cannot become a tensor"):
        DataProto.from_dict({"x": ["text"]})
    for value in ("text", 5, {"a": 1}):
        with pytest.raises(ValueError, match=r"non_tensors\['x'\] must be an array or a list"):
            DataProto.from_dict(non_tensors={"x": value})


def test_rename_gives_a_field_one_name() -> None:
    with pytest.raises(ValueError, match=r"a field has one new name, got \['x', 'x'\]"):
        make().rename(["x", "x"], ["y", "z"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int64])
def test_tensors_in_meta_info_compare_whatever_they_are(dtype: torch.dtype) -> None:
    def one(value: float) -> DataProto:
        return DataProto({"a": torch.ones(1)}, {}, {"x": torch.tensor([value, 2.0]).to(dtype)})

    assert one(1) == one(1)
    assert one(1) != one(2)
    one(1).union(one(1))
    with pytest.raises(ValueError, match=r"union: meta_info\['x'\] differs"):
        one(1).union(one(2))
    leaf = DataProto(meta_info={"x": torch.ones(2, requires_grad=True)})
    assert leaf == DataProto(meta_info={"x": torch.ones(2, requires_grad=True)})
    assert leaf != DataProto(meta_info={"x": np.ones(2)})


def test_keys_of_meta_info_of_several_types_are_shown() -> None:
    batch = DataProto({"a": torch.ones(1)}, {}, {1: 2, (1, 2): 3, "m": 4})
    assert repr(batch).endswith("meta [(1, 2), 1, 'm'])")
    with pytest.raises(ValueError, match="no meta_info"):
        batch.select(["a"], ["n"])


def test_union_with_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="union: needs a DataProto, got NoneType"):
        DataProto({"a": torch.ones(1)}).union(None)  # type: ignore[arg-type]


def test_a_conjugate_view_pickles() -> None:
    values = torch.tensor([1 + 2j, 3j], dtype=torch.complex64)
    for view in (values.conj(), values.conj().imag):
        assert pickle.loads(pickle.dumps(DataProto({"x": view}), protocol=5)) == DataProto({"x": view})


@pytest.mark.filterwarnings("ignore")  # torch finds some of these kinds old or new
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.eye(2).to_sparse(), "is sparse_coo; make it dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is a nested tensor; make it a Ragged"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is quantized; dequantize it"),
    ],
)
def test_tensors_without_plain_rows_are_refused_by_field(make: Callable[[], torch.Tensor], problem: str) -> None:
    tensor = make()
    with pytest.raises(ValueError, match=rf"tensors\['a'\] {problem}"):
        DataProto({"a": tensor})
    with pytest.raises(ValueError, match="values of a Ragged must be a dense Tensor with rows"):
        Ragged(tensor, torch.tensor([0, 2]))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda batch: batch.select("ab"), "select: needs a list of names, got 'ab'"),
        (lambda batch: batch.pop(5), "pop: needs a list of names, got 5|select: needs a list of names, got 5"),
        (lambda batch: batch.unfold_column_chunks(1, "ab"), "unfold_column_chunks: needs a list of names, got 'ab'"),
        (lambda batch: batch.to("nowhere"), "to: needs a device, got 'nowhere'"),
        (lambda batch: batch.to(torch.float16), "to: needs a device, got torch.float16"),
        (lambda batch: DataProto.concat(5), "concat joins a list of batches, got int"),  # pyright: ignore
        (lambda batch: DataProto([1]), "tensors must be a dictionary, got list"),  # pyright: ignore
        (lambda batch: DataProto({}, {}, 5), "meta_info must be a dictionary, got int"),  # pyright: ignore
    ],
)
def test_what_is_of_another_kind_than_asked_for_is_named(action: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action(DataProto({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}))
