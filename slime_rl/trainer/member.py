"""One member of a Megatron train group: its process, its process groups, and the saves of whatever it trains.

Nothing of Megatron is imported before `prepare_process` has put the stand-ins in place, which is why the imports of its
users stand inside methods.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_rl.config import Config, ParallelConfig
from slime_rl.trainer.device import prepare_process, resolve_device

if TYPE_CHECKING:
    from slime_rl.trainer.pending_save import PendingSave
    from slime_rl.trainer.state import TrainState

CRITIC_FOLDER, REFERENCE_FOLDER = "critic", "reference"  # in the checkpoint's folder of the policy


class GroupMember:
    """One rank of a train group. Its methods are collective over all ranks, but for what says something else."""

    def __init__(
        self, config: Config, parallel: ParallelConfig, rank: int, world_size: int, master: tuple[str, int], local: int
    ) -> None:
        """Join the group at `master` (address, port), on device number `local` of the machine.

        Raises:
            ValueError: flags or parallel sizes that do not fit.
        """
        self.config, self.rank, self.world_size = config, rank, world_size
        self.device_info = resolve_device(config.cluster.device)
        self.device = self.device_info.torch_device(local)
        num_processes = max(world_size, config.num_train_processes)
        prepare_process(self.device_info, local, config.cluster.train_threads_per_worker, num_processes)
        from slime_rl.trainer import distributed
        from slime_rl.trainer.arguments import parse_megatron_args

        self.states: dict[str, TrainState] = {}  # what is trained here, by its folder in a checkpoint; "" is the policy
        self._offloaded: list[Any] | None = None
        self._pending_saves: list[PendingSave] = []
        with self._leaving_on_error():
            args = parse_megatron_args(config.model.megatron_args).transformer
            place = self.device_info, rank, world_size, master, local
            self.layout = distributed.initialize(parallel, args, *place, config.train.seed)

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Where building fails, the other ranks fail at once instead of waiting for this one."""
        try:
            yield
        except BaseException:
            self.shutdown()
            raise

    @property
    def data_parallel_rank(self) -> int:
        """Which of the batches of `split_for_data_parallel` this worker takes."""
        return self.layout.dp.rank

    def wait_until_copied(self) -> None:
        """Until a save that is under way has its copy of the weights. Not collective."""
        for pending in self._pending_saves:
            pending.wait_until_copied()

    def save(self, path: str | Path, step: int, extra: dict[str, Any]) -> None:
        """Write models, optimizers, schedules and random state into `path`; the caller makes the folder atomic."""
        from slime_rl.trainer.checkpoint import save

        for folder, state in self.states.items():
            save(state, Path(path) / folder, step, extra)

    def begin_save(self, path: str | Path, step: int, extra: dict[str, Any]) -> None:
        """As `save`, with a thread that writes; `finish_save` must follow before the next one."""
        from slime_rl.trainer.checkpoint import begin_save

        assert not self._pending_saves, "the save before has not been finished"
        for folder, state in self.states.items():
            self._pending_saves.append(begin_save(state, Path(path) / folder, step, extra))

    def save_is_written(self) -> bool:
        """Whether `finish_save` would not wait. Not collective."""
        return all(pending.is_written for pending in self._pending_saves)

    def finish_save(self) -> None:
        """Make what `begin_save` began a whole checkpoint.

        Raises:
            OSError: a file could not be written, on this rank or another.
        """
        assert self._pending_saves, "no save has begun"
        pending_saves, self._pending_saves = self._pending_saves, []
        for pending in pending_saves:
            pending.finish()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a folder that `save` wrote, on any parallel layout; `{"step": …, "extra": …}`.

        Raises:
            ValueError: the folder holds no checkpoint, or one of another model.
        """
        from slime_rl.trainer.checkpoint import load

        first, *_ = [load(state, Path(path) / folder) for folder, state in self.states.items()]
        return first

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory; on a CPU they are there already, and stay."""
        from slime_rl.trainer.offload import offload

        self.wait_until_copied()
        if self.device_info.kind == "cuda" and self._offloaded is None:
            self._offloaded = [parked for state in self.states.values() for parked in offload(state)]

    def onload(self) -> None:
        """Undo `offload`."""
        from slime_rl.trainer.offload import onload

        if self._offloaded is not None:
            onload(self._offloaded)
            self._offloaded = None

    def metrics_peak_memory(self) -> dict[str, float]:
        """Peak memory of this process so far, in GiB. Not collective."""
        peak = {"perf/train_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if self.device_info.kind == "cuda":
            peak["perf/train_peak_gpu_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return peak

    def shutdown(self) -> None:
        """Leave the process group; the worker cannot be used afterwards."""
        from slime_rl.trainer.distributed import shutdown

        shutdown()
