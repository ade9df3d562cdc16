from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config

from slime_rl.cluster.run_folder import run_folder


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with run_folder(config), pytest.raises(ValueError, match="another run is using this folder"), run_folder(config):
        pass


def test_two_runs_cannot_save_to_one_folder(tmp_path: Path) -> None:
    saves = ("--save-interval", "1", "--save", str(tmp_path / "saved"))
    one, other = (make_config(tmp_path, "--run-dir", str(tmp_path / name), *saves) for name in ("one", "other"))
    with run_folder(one):
        with pytest.raises(ValueError, match=r"--save .*saved: another run is using this folder"), run_folder(other):
            pass
        with run_folder(make_config(tmp_path, "--run-dir", str(tmp_path / "third"))):
            pass
    inside = make_config(tmp_path, "--save-interval", "1", "--save", str(tmp_path / "run"))
    with run_folder(inside):
        pass


def test_a_run_that_begins_does_not_save_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "latest").write_text("step_00000100")
    saves = ("--save-interval", "1", "--save", str(saved))
    message = r"--save .*saved already holds checkpoints"
    with pytest.raises(ValueError, match=message), run_folder(make_config(tmp_path, *saves)):
        pass
    for more in (("--load", str(saved)), ("--overwrite",)):
        with run_folder(make_config(tmp_path, *saves, *more)):
            pass


def test_results_are_not_overwritten_unasked(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with run_folder(config) as folder:
        (folder / "metrics.jsonl").write_text("{}")
    with (
        pytest.raises(ValueError, match=r"already holds a run \(metrics\.jsonl\); add --overwrite"),
        run_folder(config),
    ):
        pass


def test_overwrite_removes_outputs_and_nothing_else(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--overwrite")
    with run_folder(config) as folder:
        (folder / "metrics.jsonl").write_text("{}")
        (folder / "hf").mkdir()
        (folder / "my_notes.txt").write_text("mine")
    with run_folder(config) as folder:
        assert not (folder / "metrics.jsonl").exists() and not (folder / "hf").exists()
        assert (folder / "my_notes.txt").read_text() == "mine"


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--prompt-data"])
def test_overwrite_spares_what_the_run_reads(tmp_path: Path, flag: str) -> None:
    config = make_config(tmp_path, "--overwrite")
    inside = config.run_dir / "hf" / "input"
    inside.parent.mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").touch()
    Path(config.model.hf_checkpoint if flag == "--hf-checkpoint" else str(config.data.prompt_data)).rename(inside)
    name = "input.jsonl" if flag == "--prompt-data" else "input"
    inside = inside.rename(inside.with_name(name))
    config = make_config(tmp_path, "--overwrite", flag, str(inside))
    with pytest.raises(ValueError, match=f"--overwrite would remove .*hf, which {flag} reads"), run_folder(config):
        pass
    assert inside.exists() and (config.run_dir / "metrics.jsonl").exists()


def test_overwrite_spares_the_model_whose_folder_is_the_run_folder(tmp_path: Path) -> None:
    folder = Path(make_config(tmp_path).model.hf_checkpoint)
    config = make_config(tmp_path, "--overwrite", "--run-dir", str(folder))
    with pytest.raises(ValueError, match=r"--overwrite would remove .*config\.json"), run_folder(config):
        pass
    assert (folder / "config.json").exists()


def test_resume_keeps_everything(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with run_folder(config) as folder:
        (folder / "metrics.jsonl").write_text("{}")
        (folder / "checkpoints").mkdir()
    with run_folder(make_config(tmp_path, "--load", str(folder / "checkpoints"))):
        assert (folder / "metrics.jsonl").exists()
