from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("content", [b"[]", b'{"meta.json": 3}', b"\xff", b"{"])
def test_checksums_that_cannot_be_read_are_named(tmp_path: Path, content: bytes) -> None:
    folder = CheckpointStore(tmp_path, keep=1).write(meta(1), fill)
    (folder / "checksums.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"--load .*step_00000001: cannot read checksums\.json"):
        verify(folder)


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
