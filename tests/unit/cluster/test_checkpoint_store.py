from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_rl.cluster.checkpoint import (
    CheckpointMeta,
    CheckpointStore,
    find_checkpoint,
    find_model_folder,
    model_identity,
    verify,
)


def meta(step: int) -> CheckpointMeta:
    return CheckpointMeta(step=step, model_type="llama", num_parameters_shape="32x2x96")


def fill(folder: Path) -> None:
    (folder / "model" / "weights").write_text("w")


def test_latest_is_the_last_complete_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    store.write(meta(1), fill)
    folder = store.write(meta(2), fill)
    assert store.latest() == (folder, meta(2))
    assert (folder / "model" / "weights").read_text() == "w"


def test_failure_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    first = store.write(meta(1), fill)

    def broken(folder: Path) -> None:
        fill(folder)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        store.write(meta(2), broken)
    assert store.latest()[0] == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    store.write(meta(2), fill)
    assert store.latest()[1].step == 2


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        store.write(meta(step), fill)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000004", "step_00000005"]


def test_every_mth_stays_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=3)
    for step in range(1, 9):
        store.write(meta(step), fill)
    assert sorted(int(p.name[-2:]) for p in tmp_path.glob("step_*")) == [3, 6, 8]


def test_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """What a kill leaves: parts aside; or the new one renamed and `latest` not yet; or the same step replaced."""
    store = CheckpointStore(tmp_path, keep=3)
    first = store.write(meta(1), fill)
    (store.begin(2) / "model" / "half").write_text("w")
    assert find_checkpoint(tmp_path)[0] == first
    second = store.write(meta(2), fill)
    assert not list(tmp_path.glob("*.partial"))
    second.rename(tmp_path / "step_00000002.old.partial")  # between the two renames of a save of the same step
    assert find_checkpoint(tmp_path)[0] == first
    assert verify(first) > 0


def test_a_kill_while_the_only_checkpoint_is_replaced_leaves_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    only = store.write(meta(2), fill)
    only.rename(tmp_path / "step_00000002.old.partial")
    folder, found = find_checkpoint(tmp_path)
    assert found.step == 2 and verify(folder) > 0


def test_a_run_that_goes_back_keeps_its_own_checkpoints_beside_those_of_later_steps(tmp_path: Path) -> None:
    """--load RUN_DIR/checkpoints/step_00000010 of a run that came to 30."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30):
        CheckpointStore(tmp_path, keep=9).write(meta(step), fill)
    for step in (12, 14):
        folder = store.write(meta(step), fill)
        assert find_checkpoint(tmp_path) == (folder, meta(step))
    assert sorted(int(p.name[-2:]) for p in tmp_path.glob("step_*")) == [12, 14, 20, 30]
    store.write(meta(30), fill)
    assert sorted(int(p.name[-2:]) for p in tmp_path.glob("step_*")) == [20, 30]


def test_folders_beside_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(meta(1), fill)
    (tmp_path / "step_00000001_copy").mkdir()
    store.write(meta(2), fill)
    store.write(meta(100_000_000), fill)  # a digit more
    store.write(meta(100_000_001), fill)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000001_copy", "step_100000001"]


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep=1).write(meta(1), fill)
    verify(folder)
    (folder / "model" / "weights").write_text("v")
    with pytest.raises(ValueError, match=r"model/weights is damaged \(checksum differs\)"):
        verify(folder)
    (folder / "model" / "weights").write_text("")
    with pytest.raises(ValueError, match="model/weights has 0 bytes, it had 1"):
        verify(folder)
    (folder / "model" / "weights").unlink()
    with pytest.raises(ValueError, match="model/weights is missing"):
        verify(folder)


GOOD_SUM = [1, "0123abcd"]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"\xff", r"cannot read checksums\.json"),
        (b"{", r"cannot read checksums\.json"),
        (b"[" * 100_000, r"cannot read checksums\.json"),
        (b"[]", r"checksums\.json must hold a JSON object, got \[\]"),
        (b'"' + b"a" * 1000 + b'"', r'checksums\.json must hold a JSON object, got "a{59}\.\.\.$'),
        (b"{}", r"checksums\.json must name every file of the checkpoint, but meta\.json is not in it"),
        (json.dumps({"meta.json": GOOD_SUM}).encode(), r"must name every file .*, but model/weights is not in it"),
        (b'{"checksums": 3}', r"checksums\.json: 'checksums' must have \[bytes, sum of 8 .*\], got 3"),
        (b'{"meta.json": "12"}', r"""'meta\.json' must have .*, got "12"$"""),
        (b'{"meta.json": [1e999, "0123abcd"]}', r"'meta\.json' must have .*, got \[Infinity"),
        (b'{"meta.json": [true, "0123abcd"]}', r"'meta\.json' must have .*, got \[true"),
        (b'{"meta.json": [false, "0123abcd"]}', r"'meta\.json' must have .*, got \[false"),
        (b'{"meta.json": [-1, "0123abcd"]}', r"'meta\.json' must have .*, got \[-1"),
        (b'{"meta.json": [1, 5]}', r"'meta\.json' must have .*, got \[1, 5\]"),
        (
            json.dumps({"checksums.json": GOOD_SUM}).encode(),
            r"must name files of the checkpoint, got 'checksums\.json'",
        ),
        (json.dumps({"../latest": GOOD_SUM}).encode(), r"must name files of the checkpoint, got '\.\./latest'"),
        (json.dumps({"/etc/passwd": GOOD_SUM}).encode(), r"must name files of the checkpoint, got '/etc/passwd'"),
    ],
)
def test_checksums_that_are_no_checksums_are_named(tmp_path: Path, content: bytes, rule: str) -> None:
    folder = CheckpointStore(tmp_path, keep=1).write(meta(1), fill)
    (folder / "checksums.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"--load .*step_00000001: .*{rule}"):
        verify(folder)


def test_files_that_somebody_put_beside_a_checkpoint_do_no_harm(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep=1).write(meta(1), fill)
    for name in ("notes.txt", "model/.nfs0001"):
        (folder / name).write_text("x")
    assert verify(folder) > 0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"step": "7"}, 'step must be a whole number >= 0, got "7"'),
        ({"step": True}, "step must be a whole number >= 0, got true"),
        ({"step": -1}, "step must be a whole number >= 0, got -1"),
        ({"model_type": None}, "model_type must be text, got null"),
        ({"num_parameters_shape": [1]}, r"num_parameters_shape must be text, got \[1\]"),
        ({"kind": ["run"]}, r'kind must be run or weights, got \["run"\]'),
        ({"hf_checkpoint": 3}, "hf_checkpoint must be text or null, got 3"),
        ({"model_config": []}, r"model_config must be an object or null, got \[\]"),
        ({"checksums": 3}, "must have the fields of format 2, got also 'checksums'"),
    ],
)
def test_a_field_of_meta_that_is_none_is_named(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    file = CheckpointStore(tmp_path, keep=1).write(meta(1), fill) / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"--load .*step_00000001: meta\.json: {rule}"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "rule"), [("[]", r"must hold a JSON object, got \[\]"), ("3", "must hold a JSON object, got 3")]
)
def test_meta_that_is_no_object_is_named(tmp_path: Path, content: str, rule: str) -> None:
    (CheckpointStore(tmp_path, keep=1).write(meta(1), fill) / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=rf"--load .*: meta\.json {rule}"):
        find_checkpoint(tmp_path)


def test_a_model_folder_whose_checkpoint_lost_its_meta_is_not_taken_unchecked(tmp_path: Path) -> None:
    def fill_model(folder: Path) -> None:
        (folder / "model" / "metadata.json").write_text("{}")

    folder = CheckpointStore(tmp_path, keep=1).write(meta(1), fill_model)
    (folder / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"--load .*: cannot read meta\.json"):
        find_model_folder(folder / "model")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../other/step_00000001", b"step_1/.."])
def test_pointer_that_names_no_checkpoint_of_this_folder_is_refused(tmp_path: Path, content: bytes) -> None:
    CheckpointStore(tmp_path, keep=1).write(meta(1), fill)
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(ValueError, match=r"--input-dir .*latest: must hold the name of a checkpoint"):
        find_checkpoint(tmp_path, "--input-dir")


def test_meta_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep=1).write(meta(1), fill)
    (folder / "meta.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"--load .*: cannot read meta\.json"):
        find_checkpoint(tmp_path)


def test_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    folder = store.write(meta(1), fill)
    store.write(meta(2), fill)
    assert find_checkpoint(folder) == (folder, meta(1))
    assert find_model_folder(folder) == (folder / "model", None)


def test_what_a_checkpoint_carries_is_found_and_verified(tmp_path: Path) -> None:
    def fill_all(folder: Path) -> None:
        fill(folder)
        (folder / "model" / "metadata.json").write_text("{}")
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")

    folder = CheckpointStore(tmp_path, keep=5).write(meta(1), fill_all)
    for named in (tmp_path, folder, folder / "model"):
        assert find_model_folder(named) == (folder / "model", folder / "hf")
    (folder / "hf" / "config.json").write_text("[]")
    for named in (tmp_path, folder, folder / "model"):
        with pytest.raises(ValueError, match=r"hf/config\.json is damaged"):
            find_model_folder(named)


def test_other_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (store.write(meta(1), fill) / "meta.json").write_text('{"format": 1, "step": 1}')
    with pytest.raises(ValueError, match="checkpoint format 1, this version reads 2"):
        store.latest()


def test_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        CheckpointStore(tmp_path, keep=1).latest()


def test_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (store.write(meta(3), fill) / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read meta\.json"):
        store.latest()


def test_models_of_different_shape_have_different_identities(tmp_path: Path) -> None:
    for name, layers in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            f'{{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": {layers}, "vocab_size": 5}}'
        )
    assert model_identity(str(tmp_path / "a")) == ("llama", "8x2x5")
    assert model_identity(str(tmp_path / "a")) != model_identity(str(tmp_path / "b"))
