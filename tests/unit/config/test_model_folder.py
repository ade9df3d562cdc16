from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from slime_rl.config.checks import check_model_folder
from slime_rl.config.model_folder import INDEX, check_model_files, weight_files, weight_places
from slime_rl.config.quantization import quantization_entry


def write_safetensors(path: Path, *, missing_bytes: int = 0, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes((struct.pack("<Q", len(header)) + header + bytes(8))[: -missing_bytes or None])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors")
    return tmp_path


def test_whole_folder_passes(folder: Path) -> None:
    check_model_files("--hf-checkpoint", folder)


def test_folder_without_tokenizer_is_refused_unless_none_is_needed(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    check_model_files("--ref-load", folder, needs_tokenizer=False)
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*must hold a tokenizer .*found config\.json, model\.safe"):
        check_model_files("--hf-checkpoint", folder)


def test_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hint = r"must hold weights as \*\.safetensors, found .*pytorch_model\.bin.*; .*save_pretrained writes safetensors"
    with pytest.raises(ValueError, match=hint):
        check_model_files("--hf-checkpoint", folder)


def test_missing_shard_is_noticed_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model-00001-of-00002.safetensors", name="a")
    with pytest.raises(
        ValueError, match=r"must hold all 2 files that model-00001-of-00002\.safetensors is one of, .* 1"
    ):
        check_model_files("--hf-checkpoint", folder)
    write_safetensors(folder / "model-00002-of-00002.safetensors", name="b")
    write_safetensors(folder / "mtp.safetensors", name="c")
    assert len(weight_files(folder)) == 3


def test_folder_with_the_name_of_a_weight_file_is_none(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"must hold weights as \*\.safetensors"):
        check_model_files("--hf-checkpoint", folder)


def test_file_that_is_cut_off_is_refused(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", missing_bytes=3)
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*model\.safetensors: is cut off: .*found"):
        check_model_files("--hf-checkpoint", folder)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 40, struct.pack("<Q", 4) + b"nope"])
def test_file_that_is_no_safetensors_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"must be a (whole )?safetensors file"):
        check_model_files("--hf-checkpoint", folder)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
def test_json_that_is_nested_too_deep_to_be_read_is_refused_by_name(folder: Path, name: str) -> None:
    deep = b"[" * 100_000
    (folder / name).write_bytes(struct.pack("<Q", len(deep)) + deep if name == "model.safetensors" else deep)
    with pytest.raises(ValueError, match=rf"--hf-checkpoint .*{name}: .*recursion"):
        check_model_folder("--hf-checkpoint", str(folder))
        check_model_files("--hf-checkpoint", folder)
    if name == "config.json":
        with pytest.raises(ValueError, match=r"config\.json: is not JSON: .*recursion"):
            quantization_entry(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    names = [f"model-{i}-of-2.safetensors" for i in (1, 2)]
    write_safetensors(folder / names[0], name="a")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    with pytest.raises(ValueError, match=r"names 2 files, of which 1 are missing: model-2-of-2\.safetensors"):
        check_model_files("--hf-checkpoint", folder)
    write_safetensors(folder / names[1])
    assert [file.name for file in weight_files(folder)] == names


@pytest.mark.parametrize("content", ['{"weight_map": []}', "[]", '{"weight_map": {"w": 1}}', "{}", "{"])
def test_broken_index_is_refused(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(ValueError, match=rf"--hf-checkpoint .*{INDEX}: must (map names of weights to names|be JSON)"):
        check_model_files("--hf-checkpoint", folder)


def test_weight_in_two_files_is_refused(folder: Path) -> None:
    write_safetensors(folder / "more.safetensors", name="x")
    check_model_files("--hf-checkpoint", folder)
    write_safetensors(folder / "more.safetensors")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*: w is in model\.safetensors and in more\.safetensors"):
        check_model_files("--hf-checkpoint", folder)


def test_index_that_says_what_is_not_there_is_refused(folder: Path) -> None:
    write_safetensors(folder / "more.safetensors", name="x")
    for places in (
        {"w": "more.safetensors", "x": "model.safetensors"},
        {"w": "model.safetensors", "y": "more.safetensors"},
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        with pytest.raises(
            ValueError, match=rf"{INDEX}: says that . is in more\.safetensors, which has no weight of that"
        ):
            check_model_files("--hf-checkpoint", folder)


def test_files_of_one_name_in_two_folders_are_two_files(folder: Path) -> None:
    for name in "ab":
        (folder / name).mkdir()
        write_safetensors(folder / name / "model.safetensors", name=name)
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: f"{n}/model.safetensors" for n in "ab"}}))
    assert weight_places(folder) == {n: folder / n / "model.safetensors" for n in "ab"}
