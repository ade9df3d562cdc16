"""A checkpoint that is written at once, or by a thread while training goes on.

plan (collective) ──► copy of every tensor ──► files ──► finish (collective): index
                      └── until here the weights must not change: `wait_until_copied`
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist


class PendingSave:
    """Megatron's request to save, carried out by a thread of this process."""

    def __init__(self, request: Any, *, in_background: bool) -> None:
        """`request` is a megatron AsyncRequest; its planning is done. At once: without a copy, written on return."""
        self.request, self.in_background = request, in_background
        self.error: BaseException | None = None
        self._is_copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()
        if not in_background:
            self._thread.join()

    def wait_until_copied(self) -> None:
        """Until the weights may change again."""
        self._is_copied.wait()

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the files and make them a checkpoint. Collective.

        Raises:
            OSError: a file could not be written, on this rank or another; the same on all of them.
        """
        self._thread.join()
        raise_on_all(self.error)
        for finalize in self.request.finalize_fns:
            finalize()

    def _run(self) -> None:
        try:
            arguments = list(self.request.async_fn_args)
            if self.request.async_fn is None:  # nothing to write on this rank
                return
            buckets = self.request.preload_fn() if self.request.preload_fn else arguments[1]
            arguments[1] = _copied(buckets) if self.in_background else buckets
            self._is_copied.set()
            self.request.async_fn(*arguments, **self.request.async_fn_kwargs)
        except BaseException as error:  # raised by finish
            self.error = error
        finally:
            self._is_copied.set()


def raise_on_all(error: BaseException | None, what: str = "the checkpoint") -> None:
    """Where one rank has failed to write its part of `what` every rank raises, instead of waiting for it in the next
    collective. Collective.

    Raises:
        OSError: a rank has; says which and how.
    """
    own = None if error is None else f"{type(error).__name__}: {error}"
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, reason in enumerate(found):
        if reason is not None:
            raise OSError(f"worker {rank} could not write its part of {what}: {reason}") from error


def _copied(buckets: Any) -> list[Any]:
    """The same write buckets with tensors of their own: on a CPU they are the optimizer's until here."""
    return [
        (path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (objects, tensors) in buckets
    ]
