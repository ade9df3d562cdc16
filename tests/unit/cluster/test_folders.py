"""What a run writes is checked before it computes anything: the export at the end must not be where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config

from slime_rl.cluster.folders import check_folders


@pytest.mark.parametrize(
    "flags",
    [
        ("--run-dir",),
        ("--save-interval", "1", "--save"),
        ("--save-hf",),
        ("--dump-rollouts",),
        ("--buffer-spill-dir",),
        ("--weight-sync", "disk", "--weight-sync-dir"),
    ],
    ids=lambda flags: flags[-1],
)
def test_a_folder_that_cannot_be_written_to_is_found_before_the_run(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("mine")
    inside_a_file = str(tmp_path / "file" / "new")
    with pytest.raises(ValueError, match=f"{flags[-1]} must be a folder, or be inside one, got .*file is a file"):
        check_folders(make_config(tmp_path, *flags, inside_a_file))
    with pytest.raises(ValueError, match=f"{flags[-1]} must be a folder that can be written to, got /proc/new"):
        check_folders(make_config(tmp_path, *flags, "/proc/new"))  # not even root can


def test_folders_of_each_step_are_checked_up_to_the_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--save-hf must be a folder that can be written to"):
        check_folders(make_config(tmp_path, "--save-hf", "/proc/{step}"))
    check_folders(make_config(tmp_path, "--save-hf", str(tmp_path / "exports" / "{step}")))
    assert not (tmp_path / "exports").exists()


def test_the_export_does_not_replace_the_model_that_is_read(tmp_path: Path) -> None:
    model = make_config(tmp_path).model.hf_checkpoint
    with pytest.raises(ValueError, match="--save-hf must be another folder than --hf-checkpoint"):
        check_folders(make_config(tmp_path, "--save-hf", model))


def test_the_folders_of_a_cluster_elsewhere_are_not_looked_at(tmp_path: Path) -> None:
    check_folders(make_config(tmp_path, "--ray-address", "head:6379", "--dump-rollouts", "/proc/new"))
