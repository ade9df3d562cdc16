"""Rollouts on disk, one file a step: `--dump-rollouts` writes what trains, `--load-rollouts` trains on it again.

FOLDER/step_00000007.safetensors    the step's groups (`PackedGroups`), in training order
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from slime_rl.config import Config
from slime_rl.types import Group

_NAME = re.compile(r"step_(\d{8})\.safetensors")


class RolloutDumps:
    """The dumped steps of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps that are there, rising."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir() if path.is_file())
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.safetensors"

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """One file, whole or not at all; one that exists is replaced.

        Raises:
            ValueError: there is no room, or the folder cannot be written to; names it.
        """
        from slime_rl.buffer.packed import PackedGroups  # torch: the driver only looks which steps are there

        packed = PackedGroups.pack(groups)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            packed.save(self.path(step))
        except OSError as error:
            raise ValueError(
                f"--dump-rollouts {self.folder}: cannot write {packed.nbytes} bytes of step {step}: {error}; make "
                "room, or give a folder that can be written to"
            ) from error

    def read(self, step: int) -> list[Group]:
        """The groups of `step`, equal to what was written.

        Raises:
            ValueError: it is not there, or broken; names the file.
        """
        from slime_rl.buffer.packed import PackedGroups

        path = self.path(step)
        if not path.is_file():
            raise ValueError(f"{path}: step {step} was not dumped; {_steps_there(self.folder, self.steps())}")
        try:
            packed = PackedGroups.load(path)
            return packed.unpack(range(len(packed)))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}: not a dumped step: {what}") from error

    def remove_from(self, step: int) -> None:
        """Forget `step` and all later ones: a resumed run takes them again."""
        for there in self.steps():
            if there >= step:
                self.path(there).unlink()


def open_dumps(config: Config) -> RolloutDumps | None:
    """Where --dump-rollouts writes; None without it.

    Raises:
        ValueError: another run's dumps are there, and neither --overwrite nor --load is given.
    """
    if config.rollout.dump_rollouts is None:
        return None
    check_dump_folder(config)
    dumps = RolloutDumps(Path(config.rollout.dump_rollouts))
    if not _continues(config):
        dumps.remove_from(0)
    return dumps


def check_dump_folder(config: Config) -> None:
    """Raise ValueError when --dump-rollouts would overwrite another run's dumps unasked."""
    folder = config.rollout.dump_rollouts
    if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"--dump-rollouts must be a folder, got {folder!r}")
    if folder is None or config.logging.overwrite or _continues(config):
        return
    if steps := RolloutDumps(Path(folder)).steps():
        there = _steps_there(Path(folder), steps)
        raise ValueError(f"--dump-rollouts: {there}; choose another folder, or add --overwrite")


def _continues(config: Config) -> bool:
    """Whether the run goes on with the steps of a checkpoint."""
    return config.checkpoint.load is not None and not config.checkpoint.finetune


def check_dumped_steps(config: Config, first_step: int) -> None:
    """Is every step from `first_step` on in --load-rollouts? Raises ValueError naming the first that is not."""
    if config.rollout.load_rollouts is None:
        return
    dumps = RolloutDumps(Path(config.rollout.load_rollouts))
    there = dumps.steps()
    missing = sorted(set(range(first_step, config.train.num_steps)) - set(there))
    if missing:
        raise ValueError(
            f"--load-rollouts: step {missing[0]} is not there, but steps {first_step} to {config.train.num_steps - 1} "
            f"train (--num-steps); {_steps_there(dumps.folder, there)}"
        )


def _steps_there(folder: Path, steps: list[int]) -> str:
    return f"{folder} holds {f'steps {steps[0]} to {steps[-1]}' if steps else 'no dumped step'}"


class DumpedBuffer:
    """The buffer of a run with --load-rollouts: each step takes the groups that were dumped for it.

    Nothing is reserved or generated, so there is nothing to save but how far the run is.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        assert config.rollout.load_rollouts is not None
        self.dumps = RolloutDumps(Path(config.rollout.load_rollouts))
        raw = json.loads((Path(config.model.hf_checkpoint) / "config.json").read_text())
        self._vocab_size = (raw.get("text_config") or raw).get("vocab_size")
        self._admitted: dict[int, int] = {}  # step -> groups
        self._num_committed = self._next_step = 0

    def reserve(self, num_groups: int) -> list[Group]:
        raise ValueError("--load-rollouts: a run on dumped rollouts has no prompts to generate for")

    def admit(self, group: Group) -> None:
        self.reserve(0)

    def requeue(self, group: Group) -> None:
        self.reserve(0)

    def drop(self, group: Group, reason: str) -> None:
        self.reserve(0)

    def expire(self, min_version: int, action: Literal["drop", "requeue", "mask"]) -> tuple[int, int]:
        return 0, 0  # the dumping run has trained on them: they were not too old

    def take(self, step: int, num_groups: int) -> list[Group]:
        groups = self.dumps.read(step)
        if len(groups) != num_groups:
            raise ValueError(
                f"{self.dumps.path(step)} holds {len(groups)} groups, but --rollout-batch-size is {num_groups}"
            )
        if empty := [group.group_index for group in groups if not group.samples]:
            raise ValueError(f"{self.dumps.path(step)}: the groups {empty[:5]} have no samples, so they cannot train")
        highest = max(max(sample.tokens, default=-1) for group in groups for sample in group.samples)
        if self._vocab_size is not None and highest >= self._vocab_size:
            raise ValueError(
                f"{self.dumps.path(step)} has token {highest}, but --hf-checkpoint {self.config.model.hf_checkpoint} "
                f"knows {self._vocab_size} tokens: it was dumped with another tokenizer"
            )
        self._admitted[step] = len(groups)
        return groups

    def commit(self, step: int) -> None:
        if step not in self._admitted:
            raise ValueError(f"step {step} cannot be committed: no groups were taken for it")
        self._num_committed += self._admitted.pop(step)
        self._next_step = max(self._next_step, step + 1)

    def counts(self) -> dict[str, int]:
        return {"admitted": sum(self._admitted.values()), "committed": self._num_committed}

    def state_dict(self) -> dict[str, Any]:
        return {"format": "dumped", "folder": str(self.dumps.folder)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Any run's checkpoint will do: the trainer goes on from it, and the steps come from the dumps."""
        self._admitted = {}

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def close(self) -> None: ...

    def __len__(self) -> int:
        steps = [step for step in self.dumps.steps() if step >= self._next_step and step not in self._admitted]
        return len(steps) * self.config.train.rollout_batch_size
