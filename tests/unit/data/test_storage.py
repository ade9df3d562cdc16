from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_rl.data.codec import decode, encode
from slime_rl.data.proto import DataProto, object_array
from slime_rl.data.ragged import Ragged
from slime_rl.data.samples import from_samples, to_samples
from slime_rl.data.storage import load_batch, save_batch
from slime_rl.types import Sample, Status

ODD_VALUES = [
    (1, "two", None),
    {1: "a", (2, 3): b"\x00\xff"},
    {"nested": [{"x": 1.5}, (True,)], "nan": float("inf")},
    np.arange(6, dtype=np.int16).reshape(2, 3),
]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda v: type(v).__name__)
def test_codec_gives_back_what_json_has_no_word_for(value: object) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert type(again) is type(value)
    np.testing.assert_equal(again, value)


def test_codec_writes_enumerations_as_what_they_stand_for() -> None:
    assert json.dumps(encode([Status.COMPLETED, np.float32(0.5)])) == '["completed", 0.5]'


def test_codec_gives_back_tensors_bitwise() -> None:
    tensor = torch.randn(3, 4).to(torch.bfloat16)
    assert torch.equal(decode(json.loads(json.dumps(encode(tensor)))), tensor)


def test_codec_names_the_place_of_what_it_cannot_write() -> None:
    with pytest.raises(ValueError, match=r"metadata\['a'\]\[1\] is a builtins.object"):
        encode({"a": [1, object()]}, "metadata")


def test_batch_survives_disk(tmp_path: Path) -> None:
    batch = DataProto(
        {"x": torch.randn(3, 2)[:, :1], "r": Ragged.from_list([[1.0], [], [2.0, 3.0]], torch.bfloat16)},
        {"o": object_array([("a", 1), None, {"k": [1]}]), "n": np.array([1.5, 2.5, 3.5])},
        {"step": 4, "scales": torch.ones(2)},
    )
    save_batch(batch, tmp_path / "b")
    assert load_batch(tmp_path / "b") == batch
    save_batch(batch[:1], tmp_path / "b")
    assert load_batch(tmp_path / "b") == batch[:1]
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_loading_what_is_no_batch_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a saved batch"):
        load_batch(tmp_path / "missing")


def make_sample(index: int, n: int, **changes: object) -> Sample:
    sample = Sample(index=index, group_index=0, rollout_id=index, prompt=[{"role": "user", "content": "hi"}], label="5")
    sample.set_prompt_tokens([1, 2])
    sample.append_tokens(list(range(n)), log_probs=[-0.1 * i for i in range(n)], versions=[3] * n)
    sample.append_tokens([99], trained=False)
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_samples_survive_as_columns_without_loss() -> None:
    samples = [
        make_sample(0, 3, reward=0.0, status=Status.COMPLETED, metadata={"t": (1, 2)}),
        make_sample(1, 0, reward=None, status=Status.ABORTED),
        make_sample(2, 5, reward=float("-inf"), reward_info={"fmt": 1}),
    ]
    assert to_samples(from_samples(samples)) == samples
    assert to_samples(from_samples(samples)[[2, 0]]) == [samples[2], samples[0]]
    assert to_samples(from_samples([])) == []


UNWRITABLE = {
    "objects in two dimensions": ({}, {"x": np.array([[1, "a"], [2, "b"]], dtype=object)}, "2 dimensions"),
    "structured": ({}, {"x": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])}, "use numbers or text"),
    "dates": ({}, {"x": np.array(["2024-01-01"], dtype="M8[D]")}, r"datetime64\[D\]; use numbers or text"),
    "masked": ({}, {"x": np.ma.array([1, 2], mask=[0, 1])}, "MaskedArray; make it a plain array"),
    "named like a part": (
        {"x": Ragged.from_list([[1], [2]]), "x/values": torch.ones(2)},
        {},
        "'x/values' has the name",
    ),
    "metadata": ({"__metadata__": torch.ones(2)}, {}, "for itself"),
    "number as name": ({5: torch.ones(2)}, {}, "its name must be text, got 5"),
    "number as name of objects": ({}, {5: np.ones(2)}, "its name must be text, got 5"),
    "surrogate in a name": ({"\ud800": torch.ones(2)}, {}, "half of a surrogate pair"),
    "uint16": ({"x": torch.ones(2).to(torch.uint16)}, {}, "it is uint16; convert it to one of int64"),
    "float8": ({"x": torch.ones(2).to(torch.float8_e5m2)}, {}, "it is float8_e5m2; convert it"),
    "complex": ({"x": torch.ones(2, dtype=torch.complex64)}, {}, "it is complex64; convert it"),
    "ragged of complex": ({"x": Ragged.from_list([[1j]], torch.complex64)}, {}, "it is complex64; convert it"),
    "long number": ({}, {"x": np.array([10**5000], dtype=object)}, "digits"),
    "a set": ({}, {"x": np.array([{1}], dtype=object)}, "is a builtins.set"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_would_not_come_back_equal_is_refused_by_field_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    tensors, arrays, message = UNWRITABLE[name]
    good = DataProto({"a": torch.ones(2)})
    save_batch(good, tmp_path / "b")
    with pytest.raises(ValueError, match=rf"b: cannot .*{message}"):
        save_batch(DataProto(tensors, arrays), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert load_batch(tmp_path / "b") == good


def test_a_saved_batch_that_fits_no_rule_is_named_by_its_folder(tmp_path: Path) -> None:
    save_batch(DataProto({"a": torch.ones(2)}, {"b": np.ones(2)}), tmp_path / "b")
    file = tmp_path / "b" / "batch.json"
    file.write_text(file.read_text().replace('"shape": [2]', '"shape": [1, 2]'))
    with pytest.raises(ValueError, match=r"/b: fields must have equal numbers of rows"):
        load_batch(tmp_path / "b")


def test_only_a_batch_is_replaced(tmp_path: Path) -> None:
    batch, other = DataProto({"a": torch.arange(3)}), DataProto({"a": torch.arange(4)})
    save_batch(batch, tmp_path / "batch")
    save_batch(other, tmp_path / "batch")
    assert load_batch(tmp_path / "batch") == other
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]
    mine = tmp_path / "folder" / "results.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for place, problem in ((mine.parent, r"holds results\.txt, which is no saved batch"), (mine, "is a file")):
        with pytest.raises(ValueError, match=f"{place}: {problem}"):
            save_batch(batch, place)
    with pytest.raises(ValueError, match=f"{mine}/below: cannot be written: .*Not a directory"):
        save_batch(batch, mine / "below")
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch", "folder"]
