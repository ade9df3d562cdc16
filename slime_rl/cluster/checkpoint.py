"""Run checkpoints on disk: written aside, made whole, renamed, and only then named as the latest.

    <save>/step_00000010/   model/ (torch_dist: model, optimizer, scheduler, RNG) · buffer.json, .safetensors · meta
    <save>/latest           name of the newest complete one

`step` counts finished steps: a run continues with the step of the same number.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint belongs to; compared when it is loaded."""

    step: int
    model_type: str
    num_parameters_shape: str  # hidden size x layers x vocabulary, to tell models apart
    format: int = FORMAT


class CheckpointStore:
    """All checkpoints of one run folder."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep

    def write(self, meta: CheckpointMeta, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write the parts into a folder aside, then make it the latest checkpoint in one step."""
        final = self.root / f"step_{meta.step:08d}"
        aside = self.root / f"{final.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "model").mkdir(parents=True)
        fill(aside)
        (aside / "meta.json").write_text(json.dumps(asdict(meta), indent=2))
        _sync_tree(aside)
        shutil.rmtree(final, ignore_errors=True)  # only after a crash between rename and `latest`
        aside.rename(final)
        _write_atomic(self.root / "latest", final.name)
        self._remove_old()
        return final

    def latest(self) -> tuple[Path, CheckpointMeta]:
        """The newest complete checkpoint.

        Raises:
            ValueError: there is none, or it is incomplete or of another format.
        """
        pointer = self.root / "latest"
        if not pointer.is_file():
            raise ValueError(f"--load {self.root}: no file 'latest' there, so it holds no complete checkpoint")
        folder = self.root / pointer.read_text().strip()
        try:
            meta = CheckpointMeta(**json.loads((folder / "meta.json").read_text()))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"--load {folder}: cannot read meta.json: {error}") from error
        if meta.format != FORMAT:
            raise ValueError(f"--load {folder}: checkpoint format {meta.format}, this version reads {FORMAT}")
        return folder, meta

    def _remove_old(self) -> None:
        whole = sorted(p for p in self.root.glob("step_*") if p.is_dir() and not p.name.endswith(".partial"))
        for old in whole[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    """fsync every file and folder, so that the rename cannot overtake the contents."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_atomic(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def model_identity(hf_path: str) -> tuple[str, str]:
    """(model type, shape) of a Hugging Face folder, to refuse a checkpoint of another model."""
    raw = json.loads((Path(hf_path) / "config.json").read_text())
    shape = "x".join(str(raw.get(key)) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    return str(raw.get("model_type")), shape
