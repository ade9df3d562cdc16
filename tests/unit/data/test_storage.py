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
