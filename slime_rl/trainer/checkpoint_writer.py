"""torch_dist checkpoints written by this process itself.

Megatron's writer starts a manager process and forks one child per file. In a process with Ray's, gloo's and CUDA's
threads a fork can deadlock, and when a child is killed its parent waits forever. Here an error is an error.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

_FULL_BYTES = 1 << 20  # a disk with less than this takes no checkpoint


@contextmanager
def naming_a_full_disk(folder: Path) -> Iterator[None]:
    """torch.save on a full disk is a RuntimeError that says nothing of it ("unexpected pos 704 vs 598").

    Raises:
        OSError: the disk is full, in place of a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's synchronous save without any child process; the files are the same."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        # Where the writer finds this queue it does not start a manager process for one.
        filesystem_async._results_queue = queue.Queue()
        try:
            request = super().async_save(sharded_state_dict, checkpoint_dir)
        finally:
            filesystem_async._results_queue = None
        if request.async_fn is None:  # this rank has nothing to write
            return request
        transforms, use_msc = request.async_fn.args
        return request._replace(async_fn=partial(_write, transforms, use_msc))


def _write(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write every bucket `(path, key, data)`; raises what a write raised."""
    done: dict[int, Any] = {}
    for i, bucket in enumerate(buckets):
        local: Any = queue.Queue()
        pending: Any = queue.Queue()  # where a child would say that it is done
        pending.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, local, pending, use_fsync=True, use_msc=use_msc
        )
        _, outcome = local.get()
        if isinstance(outcome, Exception):
            with naming_a_full_disk(Path(bucket[0]).parent):
                raise outcome
        done[i] = outcome
    results.put(done)
