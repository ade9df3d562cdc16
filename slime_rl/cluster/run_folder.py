"""The run folder and its lock: one run at a time writes there, and nothing finished is overwritten unasked."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from slime_rl.cluster.folders import check_spared
from slime_rl.config import Config

# What a run leaves in its folder; --overwrite removes these and nothing else.
_OUTPUTS = (
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "report.html",
    "config.json",
    "error.log",
    "checkpoints",
    "hf",
    "logs",
    "tensorboard",
    "trackers.json",
    "train_dumps",
    "trace",
    "trace.json",
)


@contextmanager
def run_folder(config: Config) -> Iterator[Path]:
    """Hold the run folder, and that of the checkpoints where it is elsewhere, for the time of the block.

    Raises:
        ValueError: another run holds one of them, the run folder has results (or the other one checkpoints) and neither
            --overwrite nor --load is given, or --overwrite would remove what this run reads.
    """
    folder, saved = config.run_dir, config.checkpoint_dir
    within = (folder.resolve(), (folder / "checkpoints").resolve())
    is_apart = config.checkpoint.save_interval is not None and saved.resolve() not in within
    with _locked("--run-dir", folder), _locked("--save", saved) if is_apart else nullcontext():
        if is_apart:
            _check_ours(config, saved)
        _make_room(config, folder)
        yield folder


@contextmanager
def _locked(flag: str, folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:  # the kernel drops the lock with the process, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{flag} {folder}: another run is using this folder; choose another one") from None
        yield


def _check_ours(config: Config, saved: Path) -> None:
    """A run that begins at step 0 would mix its checkpoints with those of another, and remove some of them."""
    options = config.checkpoint
    begins = (options.load is None or options.finetune) and not config.logging.overwrite
    if begins and (saved / "latest").exists():
        raise ValueError(
            f"--save {saved} already holds checkpoints; continue them with --load {saved} (without --finetune), choose "
            "another folder, or add --overwrite to have them replaced step by step"
        )


def outputs_in(folder: Path) -> list[str]:
    """What an earlier run has left in a folder."""
    return [name for name in _OUTPUTS if (folder / name).exists()]


def _make_room(config: Config, folder: Path) -> None:
    if config.checkpoint.load is not None and not config.checkpoint.finetune:
        return
    present = outputs_in(folder)
    if not present:
        return
    if not config.logging.overwrite:
        raise ValueError(
            f"--run-dir {folder} already holds a run ({', '.join(present)}); add --overwrite to start anew there, "
            f"--load {config.checkpoint_dir} to continue it, or choose another folder"
        )
    check_spared(config, [folder / name for name in present])
    for name in present:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for picture in folder.glob("*.png"):
        picture.unlink()
