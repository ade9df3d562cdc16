from __future__ import annotations

from pathlib import Path

import pytest

from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore, model_identity


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
    store.write(meta(2), fill)  # what was left aside is no obstacle
    assert store.latest()[1].step == 2


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        store.write(meta(step), fill)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000004", "step_00000005"]


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
