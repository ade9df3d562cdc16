"""Saving a run: one checkpoint of trainers and buffer, at once or in the background, and exports along the way.

    save(step) ─► trainers: plan, copy ─► buffer ─► [background: trainers write] ─► finish: index ─► checksums, rename
                                                                             publish() ─┘ allows the rename

In the background only files are written. What the trainers do together (the index) happens in `poll`, which is called
after every step and while a rollout is waited for, so that their collective calls have one order. A signal to end the
run waits for what is done at once. No checkpoint has its name before `publish`: the loop logs the step first, so that
a run that continues from it misses no line.
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore, model_identity, read_model_config
from slime_rl.cluster.signals import signals_held
from slime_rl.config import Config

_LEAVING_S = 60.0  # for trainers in the middle of a long step, or stuck where one of them has failed


class Saver:
    """Writes the checkpoints of a run. At most one is being written; the next one waits for it."""

    def __init__(self, config: Config, actor: Any, rollout: Any, critic: Any = None) -> None:
        """`actor`, `rollout` and `critic` are the cluster's TrainGroup, rollout manager and CriticGroup."""
        options = config.checkpoint
        self.config, self.actor, self.rollout = config, actor, rollout
        self.groups = [actor] if critic is None else [actor, critic]
        self.store = CheckpointStore(config.checkpoint_dir, options.keep_checkpoints, options.keep_checkpoint_every)
        self._unpublished: CheckpointMeta | None = None  # written aside, or being written
        self._writing: CheckpointMeta | None = None  # the trainers' threads are at work, and it may be published
        self._finishing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._model = _read_model(config)  # now: its folder may be gone by the time of a save
        self._exported: Path | None = None
        self.newest: tuple[Path, int] | None = None  # newest complete checkpoint of this run, and its finished steps

    def save(self, step: int) -> None:
        """One checkpoint after `step` finished steps, which `publish` will name; an export where --save-hf asks for it.

        Raises:
            OSError: the disk is full; the checkpoints before stay as they are.
        """
        with signals_held():
            self.wait()
            meta = self._meta(step)
            if self.config.checkpoint.async_save:
                self._begin(meta)
            else:
                self.store.write_aside(meta, lambda folder: self._fill(folder, step))
            self._unpublished = meta
        if "{step}" in (self.config.checkpoint.save_hf or ""):
            self.export(step)

    def _begin(self, meta: CheckpointMeta) -> None:
        folder = self.store.begin(meta.step)
        for group in self.groups:
            group.begin_save(str(folder / "model"), meta.step)
        self.rollout.save(str(folder / "buffer.json"))

    def publish(self) -> None:
        """Let the checkpoint of the last `save`, if any, be found; one in the background as soon as it is whole."""
        with signals_held():
            meta, self._unpublished = self._unpublished, None
            if meta is not None and self.config.checkpoint.async_save:
                self._writing = meta
            elif meta is not None:
                self.newest = (self.store.publish(meta), meta.step)

    def export(self, step: int) -> Path:
        """The model as a Hugging Face folder, unless that of this step is there already."""
        folder = self.config.checkpoint.hf_folder(self.config.run_dir, step)
        is_of_step = "{step}" in (self.config.checkpoint.save_hf or "")
        if not (is_of_step and folder == self._exported):
            self.actor.save_hf(str(folder))
            self._exported = folder
        return folder

    def poll(self) -> None:
        """Take the save that is being written one stage further if it is ready; never waits for the disk.

        Raises:
            OSError, ValueError: what went wrong in the background.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.finish_if_written()

    def finish_if_written(self) -> bool:
        """Have the trainers finish the save if they have written it; whether they are done with all saves."""
        if self._writing is not None and all(group.save_is_written() for group in self.groups):
            with signals_held():
                self._finish()
        return self._writing is None

    def wait(self) -> None:
        """Until no save is under way; raises what went wrong with it."""
        with signals_held():
            if self._writing is not None:
                self._finish()
            if self._finishing is not None:
                self._finishing.join()
                self._finishing = None
        self.poll()

    def complete(self) -> int | None:
        """The run is being left: its finished steps in the save that was under way, if it could be made whole.

        Its files are waited for; trainers that do not answer, since they are in the middle of a step, not for long.

        Raises:
            OSError, TimeoutError: what went wrong with it.
        """
        if self._writing is None and self._finishing is None:
            return None
        waiting = _Waiting(self)
        while waiting.is_alive():
            waiting.join(0.1)
            if time.monotonic() - waiting.heard_at > _LEAVING_S:
                raise TimeoutError(f"the trainers did not end their step within {_LEAVING_S:g} s")
        if waiting.error is not None:
            raise waiting.error
        assert self.newest is not None
        return self.newest[1]

    def give_up(self) -> None:
        """The trainers are lost, and with them the save that they were writing; one that is written is completed."""
        self._unpublished = self._writing = None
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None
        self._error = None

    def _finish(self) -> None:
        meta, self._writing = self._writing, None
        assert meta is not None
        for group in self.groups:
            group.finish_save()
        self._finishing = threading.Thread(target=self._finish_store, args=(meta,), name="finish-save", daemon=True)
        self._finishing.start()

    def _finish_store(self, meta: CheckpointMeta) -> None:
        try:
            self.newest = (self.store.finish(meta), meta.step)
        except BaseException as error:  # raised by the next poll
            self._error = error

    def _fill(self, folder: Path, step: int) -> None:
        for group in self.groups:
            group.save(str(folder / "model"), step)
        self.rollout.save(str(folder / "buffer.json"))

    def _meta(self, step: int) -> CheckpointMeta:
        return CheckpointMeta(step=step, **self._model)


def _read_model(config: Config) -> dict[str, Any]:
    """What a checkpoint says of the model it belongs to."""
    path = config.model.hf_checkpoint
    model_type, shape = model_identity(path)
    return {
        "model_type": model_type,
        "num_parameters_shape": shape,
        "hf_checkpoint": str(Path(path).absolute()),
        "model_config": read_model_config(path),
    }


class _Waiting(threading.Thread):
    """`Saver.wait` in a thread that can be given up; `error` is what it raised.

    `heard_at` is when the trainers have answered last, by `time.monotonic`; infinite once they are not needed.
    """

    def __init__(self, saver: Saver) -> None:
        super().__init__(name="complete-save", daemon=True)
        self.saver = saver
        self.error: Exception | None = None
        self.heard_at = time.monotonic()
        self.start()

    def run(self) -> None:
        try:
            while not self.saver.finish_if_written():
                self.heard_at = time.monotonic()
                time.sleep(0.1)
            self.heard_at = math.inf
            self.saver.wait()
        except Exception as error:
            self.error = error
