"""The worker that trains: a plain class, one per process, that the cluster wraps.

    TrainWorker(config, rank, …)
        device, threads, stand-ins ─► process groups ─► model from config.json ─► weights ─► DDP, optimizer, schedule
    .train(step, batch)            .compute_log_probs(batch, which)      .compute_values(batch)
    .export_weights()              .save_hf(path)
    .save(path, step, extra)       .load(path)
    .offload() / .onload()

Nothing of Megatron is imported before `prepare_process` has put the stand-ins in place, which is why the imports of its
users stand inside methods.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from slime_rl.config import Config
from slime_rl.observability.trace import open_trace
from slime_rl.trainer.device import prepare_process, resolve_device

if TYPE_CHECKING:
    from slime_rl.data.batches import RolloutBatch
    from slime_rl.trainer.pending_save import PendingSave
    from slime_rl.trainer.state import TrainState

CRITIC_FOLDER, REFERENCE_FOLDER = "critic", "reference"  # in the checkpoint's folder of the policy


class TrainWorker:
    """One rank of the Megatron train group. Every method but `metrics_peak_memory` is collective over all ranks."""

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        local_rank: int = 0,
    ) -> None:
        """Join the group at master_addr:master_port and build the model with the weights of --hf-checkpoint.

        Raises:
            ValueError: flags, parallel sizes or a checkpoint that do not fit.
        """
        self.config, self.rank, self.world_size = config, rank, world_size
        self.device_info = resolve_device(config.cluster.device)
        self.device = self.device_info.torch_device(local_rank)
        prepare_process(self.device_info, local_rank, config.cluster.train_threads_per_worker, world_size)
        from slime_rl.trainer import distributed
        from slime_rl.trainer.arguments import parse_megatron_args
        from slime_rl.trainer.setup import build_critic, build_state

        self.state: TrainState
        self.critic: TrainState | None = None
        try:
            layout = distributed.initialize(
                config.parallel,
                parse_megatron_args(config.model.megatron_args).transformer,
                self.device_info,
                rank,
                world_size,
                (master_addr, master_port),
                local_rank,
                config.train.seed,
            )
            self.state, self.conversion = build_state(config, layout, self.device)
            if config.needs_critic:
                self.critic = build_critic(config, layout, self.device)
        except BaseException:
            distributed.shutdown()  # the other ranks fail at once instead of waiting for this one
            raise
        self._offloaded: Any = None
        self.state.trace = open_trace(config, f"trainer_{rank}")
        self._pending_saves: list[PendingSave] = []  # of the policy, and of the critic

    @property
    def data_parallel_rank(self) -> int:
        """Which of the batches of `split_for_data_parallel` this worker takes."""
        return self.state.layout.dp.rank

    def train(self, step: int, batch: RolloutBatch) -> dict[str, float]:
        """Train on this data-parallel rank's share of a step's batch; metrics over the world, the same on every rank.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; names step, micro-batch and samples.
            ValueError: a batch that does not fit.
        """
        from slime_rl.trainer.step import train_step

        for pending in self._pending_saves:
            pending.wait_until_copied()
        with self.state.trace.span("steps", f"step {step}"):
            metrics = train_step(self.state, step, batch, self.critic)
        self.state.trace.flush()
        return metrics

    def compute_log_probs(self, batch: RolloutBatch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        """Log-probs `[t]` float32 of the response tokens, in the order of the batch's samples, on the CPU.

        Raises:
            ValueError: the reference was asked for and the run has none.
        """
        from contextlib import nullcontext

        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.token_pass import token_pass

        reference = self.state.reference
        if which == "reference" and reference is None:
            raise ValueError("there is no reference model: neither --use-kl-loss nor --kl-coef asks for one")
        shard = make_shard(self.config, batch, self.device)
        weights = nullcontext()
        if which == "reference" and reference is not None:
            weights = reference.swapped_into(self.state.models)
        with weights:
            return token_pass(self.state, shard).cpu()

    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """The critic's values `[t]` float32 of the response tokens, as `compute_log_probs` orders them.

        Raises:
            ValueError: the run has no critic.
        """
        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.token_pass import token_pass

        if self.critic is None:
            raise ValueError("there is no critic: only --advantage-estimator gae has one")
        return token_pass(self.critic, make_shard(self.config, batch, self.device)).cpu()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on the worker's device), one at a time, in the same order on every rank.

        A tensor may share memory with the model: read it before the next `train`.
        """
        yield from self.conversion.export_weights(self.state.models)

    def save_hf(self, path: str | Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer, chat template) that transformers and SGLang load."""
        from slime_rl.trainer.hf_export import save_hf

        kept = self.conversion.kept_weights(self.config.model.hf_checkpoint) if self.rank == 0 else ()
        save_hf(chain(self.export_weights(), kept), Path(path), self.config, is_writer=self.rank == 0)

    def save(self, path: str | Path, step: int, extra: dict[str, Any]) -> None:
        """Write model, optimizer, schedule and random state into `path`; the caller makes the folder atomic."""
        from slime_rl.trainer.checkpoint import save

        self._save_reference(Path(path))
        save(self.state, Path(path), step, self._with_own_extra(extra))
        if self.critic is not None:
            save(self.critic, Path(path) / CRITIC_FOLDER, step, {})

    def begin_save(self, path: str | Path, step: int, extra: dict[str, Any]) -> None:
        """As `save`, with a thread that writes; `finish_save` must follow before the next one."""
        from slime_rl.trainer.checkpoint import begin_save

        assert not self._pending_saves, "the save before has not been finished"
        self._save_reference(Path(path))
        self._pending_saves.append(begin_save(self.state, Path(path), step, self._with_own_extra(extra)))
        if self.critic is not None:
            self._pending_saves.append(begin_save(self.critic, Path(path) / CRITIC_FOLDER, step, {}))

    def save_is_written(self) -> bool:
        """Whether `finish_save` would not wait. Not collective."""
        return all(pending.is_written for pending in self._pending_saves)

    def finish_save(self) -> None:
        """Make what `begin_save` began a whole checkpoint.

        Raises:
            OSError: a file could not be written, on this rank or another.
        """
        pending_saves, self._pending_saves = self._pending_saves, []
        for pending in pending_saves:
            pending.finish()

    def _with_own_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        control = self.state.adaptive_kl
        return extra if control is None else {**extra, "kl_coef": control.coef}

    def _save_reference(self, path: Path) -> None:
        """Where the reference follows the policy it is in no other place than here."""
        from slime_rl.trainer.checkpoint import save_reference

        if self.config.model.ref_update_interval is not None:
            save_reference(self.state, path / REFERENCE_FOLDER)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a folder that `save` wrote, on any parallel layout; `{"step": …, "extra": …}`.

        Raises:
            ValueError: the folder holds no checkpoint, or one of another model.
        """
        from slime_rl.trainer.checkpoint import load, load_reference

        if self.critic is not None:
            load(self.critic, Path(path) / CRITIC_FOLDER)
        loaded = load(self.state, Path(path))
        if self.config.model.ref_update_interval is not None and (Path(path) / REFERENCE_FOLDER).is_dir():
            load_reference(self.state, Path(path) / REFERENCE_FOLDER)
        if self.state.adaptive_kl is not None and "kl_coef" in loaded["extra"]:
            self.state.adaptive_kl.coef = loaded["extra"]["kl_coef"]
        return loaded

    def load_weights(self, path: str | Path) -> None:
        """Take only the weights of a folder that `save` or a conversion wrote, on any parallel layout.

        Raises:
            ValueError: the folder holds no checkpoint, or one of another model.
        """
        from slime_rl.trainer.checkpoint import load_weights

        load_weights(self.state, Path(path))

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory; on a CPU they are there already, and stay."""
        from slime_rl.trainer.offload import offload

        for pending in self._pending_saves:
            pending.wait_until_copied()
        if self.device_info.kind == "cuda" and self._offloaded is None:
            self._offloaded = offload(self.state) + (offload(self.critic) if self.critic is not None else [])

    def onload(self) -> None:
        """Undo `offload`."""
        from slime_rl.trainer.offload import onload

        if self._offloaded is not None:
            onload(self._offloaded)
            self._offloaded = None

    def metrics_peak_memory(self) -> dict[str, float]:
        """Peak memory of this process so far, in GiB."""
        peak = {"perf/train_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if self.device_info.kind == "cuda":
            peak["perf/train_peak_gpu_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return peak

    def shutdown(self) -> None:
        """Leave the process group; the worker cannot be used afterwards."""
        from slime_rl.trainer.distributed import shutdown

        shutdown()
