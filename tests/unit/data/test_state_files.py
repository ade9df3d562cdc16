from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_rl.data.state_files import load_state, save_state
from slime_rl.data.tensor_file import write_tensors


def test_state_comes_back_with_its_tensors_wherever_they_are(tmp_path: Path) -> None:
    tensors = [torch.arange(5, dtype=torch.int32), torch.randn(3, 4)[:, 1:2], torch.empty(0, dtype=torch.int64)]
    state: dict[str, Any] = {"a": [1, 2], "b": {"c": [tensors[0], {"d": tensors[1]}], "e": None}, "f": tensors[2]}
    save_state(tmp_path / "s.json", state | {"g": (1.5, "x", True), "h": [[3, tensors[0]], (4, {"t": tensors[0]})]})
    again = load_state(tmp_path / "s.json")
    assert again["h"][0][0] == 3 and torch.equal(again["h"][0][1], tensors[0])
    assert again["h"][1][0] == 4 and torch.equal(again["h"][1][1]["t"], tensors[0])
    assert again["a"] == [1, 2] and again["g"] == [1.5, "x", True] and again["b"]["e"] is None
    loaded = [again["b"]["c"][0], again["b"]["c"][1]["d"], again["f"]]
    for before, after in zip(tensors, loaded, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)


def test_state_without_tensors_is_one_file(tmp_path: Path) -> None:
    save_state(tmp_path / "s.json", {"x": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]
    assert load_state(tmp_path / "s.json") == {"x": 1}


def test_what_cannot_be_saved_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] is a builtins.set"):
        save_state(tmp_path / "s.json", {"a": [1.0, {1}]})
    with pytest.raises(ValueError, match=r"state\['a'\] has a key that is not text"):
        save_state(tmp_path / "s.json", {"a": {1: 2}})
    with pytest.raises(ValueError, match=r"none.json: cannot be read"):
        load_state(tmp_path / "none.json")
    save_state(tmp_path / "s.json", {"x": torch.ones(2)})
    (tmp_path / "s.safetensors").unlink()
    with pytest.raises(ValueError, match=r"s.safetensors beside it lacks 'tensor_0'"):
        load_state(tmp_path / "s.json")


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    kinds = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float64, torch.int8)
    tensors = {f"t{i}": (torch.rand(3, i + 1) * 9).to(kind) for i, kind in enumerate(kinds)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    again = load_file(tmp_path / "x.safetensors")
    assert again.keys() == tensors.keys()
    assert all(
        torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    with pytest.raises(ValueError, match=r"cannot write 'z': it is complex64; convert it"):
        write_tensors(tmp_path / "y.safetensors", {"z": torch.zeros(1, dtype=torch.complex64)})
