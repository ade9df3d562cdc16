"""A checkpoint that a thread writes while training goes on.

plan (collective) ──► copy of every tensor ──► files ──► finish (collective): index
                      └── until here the weights must not change: `wait_until_copied`
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist


class PendingSave:
    """Megatron's request to save, carried out by a thread of this process."""

    def __init__(self, request: Any) -> None:
        """`request` is a megatron AsyncRequest; its planning is done."""
        self.request = request
        self.error: BaseException | None = None
        self._is_copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Until the weights may change again."""
        self._is_copied.wait()

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the files and make them a checkpoint. Collective.

        Raises:
            OSError: a file could not be written, on this rank or another.
        """
        self._thread.join()
        if self.error is not None:
            raise self.error
        dist.barrier()
        for finalize in self.request.finalize_fns:
            finalize()

    def _run(self) -> None:
        try:
            arguments = list(self.request.async_fn_args)
            if self.request.async_fn is None:  # nothing to write on this rank
                return
            arguments[1] = _copied(self.request.preload_fn() if self.request.preload_fn else arguments[1])
            self._is_copied.set()
            self.request.async_fn(*arguments, **self.request.async_fn_kwargs)
        except BaseException as error:  # raised by finish
            self.error = error
        finally:
            self._is_copied.set()


def _copied(buckets: Any) -> list[Any]:
    """The same write buckets with tensors of their own: on a CPU they are the optimizer's until here."""
    return [
        (path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (objects, tensors) in buckets
    ]
